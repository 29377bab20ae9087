"""Query analysis: query -> profile, in tiers (thresholds, trained classifier, sentence encoder)."""

from qbe.analysis.analyzer import Analyzer
from qbe.analysis.profile import CLASSES, QueryProfile

__all__ = ["CLASSES", "Analyzer", "QueryProfile"]
