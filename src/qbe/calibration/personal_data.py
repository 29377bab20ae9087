"""Personal data in passages, found by the patterns and check digits of Microsoft's Presidio, and replaced by its kind.

No language model takes part: what has no form of its own, such as names and addresses, is not found.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_LEAST = 0.4  # confidence; patterns that fit any number have less
_KINDS = (
    "PhoneRecognizer", "CreditCardRecognizer", "IbanRecognizer", "IpRecognizer", "MacAddressRecognizer",
    "CryptoRecognizer", "UsSsnRecognizer", "UsItinRecognizer", "NhsRecognizer", "UkNinoRecognizer", "EsNifRecognizer",
    "EsNieRecognizer", "ItFiscalCodeRecognizer", "PlPeselRecognizer", "FiPersonalIdentityCodeRecognizer",
    "SgFinRecognizer", "InAadhaarRecognizer", "AuTfnRecognizer",
)  # fmt: skip


class Masker:
    """Replaces personal data; counts what it replaced, by kind."""

    def __init__(self) -> None:
        from presidio_analyzer import predefined_recognizers as known

        class Email(known.EmailRecognizer):
            def validate_result(self, pattern_text: str) -> bool | None:
                return None  # Presidio's own asks a list of domains that it fetches from the network

        self._recognizers: list[Any] = [Email(), *(getattr(known, kind)() for kind in _KINDS)]
        self.counts: Counter[str] = Counter()

    def mask(self, text: str) -> str:
        """The text with `<EMAIL_ADDRESS>` and the like in place of what was found. Of what overlaps the surest counts,
        and of those the longest."""
        found = [
            (match.score, match.end - match.start, match.start, match.end, match.entity_type)
            for recognizer in self._recognizers
            for match in recognizer.analyze(text, recognizer.supported_entities, None) or ()
            if match.score >= _LEAST
        ]
        kept: list[tuple[int, int, str]] = []
        for _, _, start, end, kind in sorted(found, reverse=True):
            if all(end <= begun or start >= ended for begun, ended, _ in kept):
                kept.append((start, end, kind))
        for start, end, kind in sorted(kept, reverse=True):
            text = f"{text[:start]}<{kind}>{text[end:]}"
            self.counts[kind] += 1
        return text
