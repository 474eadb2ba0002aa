"""Choosing a token from logits."""

from __future__ import annotations

from collections import Counter

import pytest

np = pytest.importorskip("numpy")

from stepcast.workers.causal_lm_step import Sampling  # noqa: E402
from stepcast.workers.sampling import sample  # noqa: E402

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))


def draw(logits: np.ndarray, count: int, **settings: float) -> Counter[int]:
    sampling = Sampling(**settings)  # type: ignore[arg-type]
    return Counter(sample(logits, sampling, position) for position in range(count))


def test_temperature_0_takes_the_likeliest_whatever_the_seed() -> None:
    """Greedy sampling takes the largest logit, and the first of two that are equal."""
    assert draw(np.array([0, 2, 1], dtype=np.float32), 5, seed=9) == {1: 5}
    assert draw(np.array([0, 2, 2], dtype=np.float32), 1) == {1: 1}


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    """At temperature 1 the frequencies over many positions are the model's probabilities."""
    counts = draw(LOGITS, 8000, temperature=1.0, seed=3)
    for token, probability in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert counts[token] / 8000 == pytest.approx(probability, abs=0.02)


def test_temperature_sharpens_and_flattens() -> None:
    """At temperature 1/2 the probabilities are squared; a tiny temperature is greedy, not an overflow."""
    counts = draw(LOGITS, 8000, temperature=0.5, seed=3)
    assert counts[0] / 8000 == pytest.approx(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), abs=0.02)
    assert draw(LOGITS, 50, temperature=1e-12) == {0: 50}


@pytest.mark.parametrize(("top_p", "kept"), [(1.0, 4), (0.96, 4), (0.9, 3), (0.6, 2), (0.3, 1), (1e-9, 1)])
def test_top_p_keeps_the_fewest_likeliest_tokens(top_p: float, kept: int) -> None:
    """Only the likeliest tokens that together reach top_p are ever chosen, and at least one always is."""
    assert set(draw(LOGITS, 2000, temperature=1.0, top_p=top_p, seed=5)) == set(range(kept))


def test_choice_depends_on_seed_and_position_alone() -> None:
    """The same seed and position choose the same token, in any order; these very tokens, in every release."""
    logits = np.zeros(1000, dtype=np.float32)
    sampling = Sampling(temperature=1.0, seed=2**64 - 1)
    tokens = [sample(logits, sampling, position) for position in range(4)]
    assert [sample(logits, sampling, position) for position in (3, 2, 1, 0)] == tokens[::-1]
    assert tokens == [275, 511, 974, 348]
    assert [sample(logits, Sampling(temperature=1.0, seed=0), position) for position in range(4)] != tokens


def test_rounding_does_not_change_the_choice() -> None:
    """Logits that differ by what another order of summation does give the same tokens."""
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 3, 50_000).astype(np.float32)
    other = logits + generator.normal(0, 1e-5, 50_000).astype(np.float32)
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=11)
    assert [sample(logits, sampling, p) for p in range(50)] == [sample(other, sampling, p) for p in range(50)]


def test_impossible_tokens_are_never_chosen() -> None:
    """A token whose logit is -inf never comes."""
    logits = np.array([0, -np.inf, 0], dtype=np.float32)
    assert set(draw(logits, 500, temperature=5.0)) == {0, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_an_error(temperature: float) -> None:
    """NaN logits raise instead of choosing some token."""
    with pytest.raises(ValueError, match="NaN"):
        sample(np.array([0, np.nan], dtype=np.float32), Sampling(temperature=temperature), 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", None),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", True),
    ],
)
def test_settings_outside_their_range_are_refused(name: str, value: object) -> None:
    """A setting outside its range is a ValueError that names it and what was given."""
    with pytest.raises(ValueError, match=f"{name} must be .*not"):
        Sampling(**{name: value})  # type: ignore[arg-type]
