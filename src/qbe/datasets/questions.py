"""What `qbe bench speculate` asks."""

from __future__ import annotations

import random
from pathlib import Path

PROMPTS = (
    "Write a short story about a dog who learns to fly.",
    "Explain how photosynthesis works.",
    "Write a Python function that returns the n-th Fibonacci number, and explain each line.",
    "Repeat this text and correct its spelling: The quik brown fox jumpd over the lazy dog, wich was sleeping in the "
    "sun. The dog woke up and lookd at the fox. The fox ran away into the forrest, were it met a bear.",
    "Summarise in three sentences: The water cycle describes how water evaporates from the surface of the earth, rises "
    "into the atmosphere, cools and condenses into rain or snow in clouds, and falls again to the surface.",
    "List ten countries of Europe with their capitals, one a line.",
    "What is the difference between a virus and a bacterium?",
    "Translate into French: Good morning, where is the railway station?",
)


def questions(data: Path, each: int) -> list[str]:
    """These, and `each` of GSM8K, HumanEval and Alpaca's tasks, in an order of their own.

    Raises:
        QBEError: a file of the data sets is missing, or not what its name says.
    """
    from qbe.datasets.items import read, read_training

    items = read(("gsm8k", "humaneval"), data, each, hint="")
    items += read_training(data, each, ("alpaca",))
    asked = [*PROMPTS, *(item.chat.prompt for item in items if item.chat is not None)]
    random.Random(0).shuffle(asked)
    return asked
