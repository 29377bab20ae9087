"""The one colour scale for bits: dark is few, bright is many, ordered also for colour-blind eyes and in grey.

Viridis (van der Walt and Smith, matplotlib 1.5) with its steps placed where the gears are: most of the scale lies
between 2 and 8 bits, and 16 is its bright end.
"""

from __future__ import annotations

from itertools import pairwise

# Viridis at ten even steps.
_VIRIDIS = (
    (68, 1, 84),
    (72, 40, 120),
    (62, 73, 137),
    (49, 104, 142),
    (38, 130, 142),
    (31, 158, 137),
    (53, 183, 121),
    (110, 206, 88),
    (181, 222, 43),
    (253, 231, 37),
)
# bits -> place on the scale, straight in between.
_PLACES = ((1.0, 0.0), (2.0, 0.1), (8.0, 0.82), (16.0, 1.0))
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)


def colour(bits: float) -> str:
    """The colour of 1 to 16 bits (fractions too) as `#rrggbb`."""
    return "#{:02x}{:02x}{:02x}".format(*_rgb(bits))


def ink(bits: float) -> str:
    """Black or white, whichever reads better on `colour(bits)`, as `#rrggbb`."""
    ground = _rgb(bits)
    return "#{:02x}{:02x}{:02x}".format(*max(_BLACK, _WHITE, key=lambda text: contrast(text, ground)))


def contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    """Contrast ratio of two sRGB colours, 1 to 21 (WCAG 2.2)."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(rgb: tuple[int, int, int]) -> float:
    """Relative luminance of an sRGB colour, 0 to 1 (WCAG 2.2)."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _rgb(bits: float) -> tuple[int, int, int]:
    place = _between(min(16.0, max(1.0, bits))) * (len(_VIRIDIS) - 1)
    i = min(int(place), len(_VIRIDIS) - 2)
    red, green, blue = (round(a + (b - a) * (place - i)) for a, b in zip(_VIRIDIS[i], _VIRIDIS[i + 1], strict=True))
    return red, green, blue


def _between(bits: float) -> float:
    for (low, start), (high, end) in pairwise(_PLACES):
        if bits <= high:
            return start + (end - start) * (bits - low) / (high - low)
    return 1.0
