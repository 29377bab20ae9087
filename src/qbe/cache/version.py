"""The version of a cache's entries: a digest of all that a blueprint depends on beside query and budget."""

from __future__ import annotations

import hashlib
import inspect
from functools import cache
from pathlib import Path

from qbe import analysis, blueprint, budget, policies, sites
from qbe.cache import fingerprint
from qbe.cache.fingerprint import constants
from qbe.policies import Policy
from qbe.sites import SiteTable
from qbe.version import __version__

FORMAT = 1  # of cells and entries
# Code and trained data that profiles and blueprints come from. A change of any leaves older entries unused. Modules and
# not paths: one that is moved or renamed fails at import and is never left out in silence.
_SOURCES = (analysis, policies, fingerprint, blueprint, budget, sites)


def version_of(table: SiteTable, policy: Policy, policy_version: str) -> str:
    """32 hex digits that change with the model, its store, what was measured on it, the policy and QBE's own code."""
    kv = [(s.layer, s.head, s.query_heads, s.numbers, sorted(s.sensitivity.items()), s.entropy) for s in table.kv]
    of_policy = (policy.name, policy_version, type(policy).__qualname__, _source_of(type(policy)))
    facts = (FORMAT, __version__, constants(), _code(), of_policy, table.digest, table.difficult_entropy, kv,
             table.context)  # fmt: skip
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


@cache
def _code() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for module in _SOURCES:
        path = Path(str(module.__file__))
        files = sorted(p for p in path.parent.rglob("*") if p.is_file()) if path.name == "__init__.py" else [path]
        for file in files:
            if file.suffix != ".pyc":
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _source_of(policy: type) -> str:
    """Digest of the file that a plug-in's class was written in; empty where there is none."""
    try:
        file = inspect.getsourcefile(policy)
        return "" if file is None else hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    except (OSError, TypeError):
        return ""
