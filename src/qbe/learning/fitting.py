"""scikit-learn, which training alone needs."""

from __future__ import annotations

import warnings
from typing import Any

from qbe.errors import QBEError


def check() -> None:
    """Raises QBEError without scikit-learn: told before minutes of work, not after."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise QBEError("training needs scikit-learn: 'pip install qbe[train]'") from error


def logistic_regression(x: Any, y: Any, strength: float) -> Any:
    """A fitted multinomial logistic regression in which every class weighs the same."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, class_weight="balanced", max_iter=2000).fit(x, y)


def network(x: Any, y: Any, hidden: int, seed: int) -> Any:
    """A fitted regression with one hidden layer of rectified units."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # that many passes are what is wanted
        return MLPRegressor(
            hidden_layer_sizes=(hidden,), max_iter=150, learning_rate_init=5e-3, alpha=1e-4, random_state=seed,
            batch_size=min(64, len(x)), tol=0.0,
        ).fit(x, y)  # fmt: skip
