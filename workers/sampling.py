"""From a row of logits to a token. Pure NumPy: the same on every machine that computed the same logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .causal_lm_step import Sampling


def sample(logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """Choose a token.

    With a temperature the choice is a race of exponential clocks: token i's clock is exponential noise divided by its
    probability, and the first to ring wins, which happens with just that probability. The noise is drawn per token id
    from a counter-based generator, keyed by the seed and counting positions. So the choice depends on nothing but
    seed, position and logits, not on the batch or on earlier draws; and since a token's noise does not depend on the
    other tokens' probabilities, the rounding that differs between world sizes only matters in a photo finish.

    Args:
        logits: one finite value (or -inf) per token of the vocabulary.
        sampling: temperature, top-p and seed.
        position: where the token will stand in its sequence, from 0.

    Returns:
        The token's id: the likeliest where the temperature is 0.

    Raises:
        ValueError: a logit is NaN.
    """
    if np.isnan(logits).any():
        raise ValueError("the model's logits are NaN: check its weights and its dtype")
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    probabilities = weights / weights.sum()
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    # The generator counts in the lowest word as it draws: the position stands above it, so that streams never meet.
    noise = np.random.Generator(np.random.Philox(key=sampling.seed, counter=[0, position, 0, 0]))
    return int((probabilities / noise.standard_exponential(len(logits))).argmax())


def _nucleus(probabilities: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """Zero all but the fewest likeliest tokens that together reach `top_p`."""
    order = np.argsort(-probabilities, kind="stable")
    kept = order[: np.searchsorted(probabilities[order].cumsum(), top_p) + 1]
    nucleus = np.zeros_like(probabilities)
    nucleus[kept] = probabilities[kept]
    return nucleus
