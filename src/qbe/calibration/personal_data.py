"""Personal data in passages, found by the patterns and check digits of Microsoft's Presidio, and replaced by its kind.

Where Presidio lets pass what has the form all the same, the form counts: social security numbers of examples, and
addresses of mail that are spelt out.

No language model takes part: what has no form of its own, such as names and addresses, is not found.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_LEAST = 0.4  # confidence; patterns that fit any number have less
_KINDS = (
    "PhoneRecognizer", "CreditCardRecognizer", "IbanRecognizer", "IpRecognizer", "MacAddressRecognizer",
    "CryptoRecognizer", "UsItinRecognizer", "NhsRecognizer", "UkNinoRecognizer", "EsNifRecognizer",
    "EsNieRecognizer", "ItFiscalCodeRecognizer", "PlPeselRecognizer", "FiPersonalIdentityCodeRecognizer",
    "SgFinRecognizer", "InAadhaarRecognizer", "AuTfnRecognizer",
)  # fmt: skip
# Addresses of mail as people write them against machines: "jane [at] example.com", "jane(at)example(dot)com", and
# without brackets where the dot is a word, too. Lengths are those of RFC 1035 and 5321, so that no text takes long.
_AT, _DOT = (rf"\s{{0,3}}[\[({{<]\s?{sign}\s?[\])}}>]\s{{0,3}}" for sign in (r"(?:at|@)", r"(?:dot|\.)"))
_DOTS = rf"(?:{_DOT}|\s{{1,3}}dot\s{{1,3}})"
_NAME, _LABEL = r"\b[A-Za-z0-9](?:[\w.%+-]{0,62}\w)?", r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_SPELT = (
    rf"{_NAME}{_AT}(?:{_LABEL}(?:{_DOTS}|\.)){{1,8}}[A-Za-z]{{2,63}}\b",
    rf"{_NAME}(?:\s{{1,3}}at\s{{1,3}}|\s{{0,3}}@\s{{0,3}})(?:{_LABEL}{_DOTS}){{1,8}}[A-Za-z]{{2,63}}\b",
)


class Masker:
    """Replaces personal data; counts what it replaced, by kind."""

    def __init__(self) -> None:
        from presidio_analyzer import Pattern
        from presidio_analyzer import predefined_recognizers as known

        class Email(known.EmailRecognizer):
            def validate_result(self, pattern_text: str) -> bool | None:
                return None  # Presidio's own asks a list of domains that it fetches from the network

        class SocialSecurity(known.UsSsnRecognizer):
            def invalidate_result(self, pattern_text: str) -> bool:
                # Its form is enough: people write numbers that were never issued, too, and Presidio lets those pass.
                return len({c for c in pattern_text if not c.isdigit()}) > 1

        forms = [*known.EmailRecognizer.PATTERNS, *(Pattern("spelt out", form, 0.5) for form in _SPELT)]
        self._recognizers: list[Any] = [Email(forms), SocialSecurity(), *(getattr(known, kind)() for kind in _KINDS)]
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
