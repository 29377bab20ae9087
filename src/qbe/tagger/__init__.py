"""Layer tagger: from a transformers causal LM to the table of its sites.

`walk.py` goes through the modules in order, `regions.py` recognises the block that a module stands in (attention,
feed-forward, mixture of experts, state-space mixer, vision tower...) from structure, and `roles.py` names one module
inside its block.
"""

from qbe.tagger.walk import tag

__all__ = ["tag"]
