"""What train_lm.py writes down: metrics as JSON lines while it runs, a picture of them at the end.

Events, one a line: ``start`` (flags, sizes, a unigram model's bits per byte), ``train`` and
``validation`` (of a step), ``end`` (the result). What does not apply is null.
"""

import json
import pathlib
import time
from typing import Any

import jax
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Log:
    """Writes events to ``metrics.jsonl`` in a directory of its own, and keeps them."""

    def __init__(self, directory: pathlib.Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        self.path.write_text("")
        self.events: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})
        with self.path.open("a") as file:
            file.write(json.dumps(self.events[-1]) + "\n")

    def series(self, event: str, field: str) -> tuple[list[int], list[float]]:
        """Steps and values of a field of all such events, where it is not null."""
        events = [e for e in self.events if e["event"] == event and e[field] is not None]
        return [e["step"] for e in events], [e[field] for e in events]


class Meter:
    """Means of the training losses, and tokens per second, since it was last started."""

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step
        self.start()

    def start(self) -> None:
        self.losses, self.since = [], time.perf_counter()

    def add(self, losses: tuple[jax.Array, jax.Array]) -> None:
        """Of one step, ``(bits per byte, indexer loss)``; the values are not waited for."""
        self.losses.append(losses)

    def read(self) -> dict[str, float]:
        """Waits for the steps added so far."""
        bits, index_loss = np.mean(jax.device_get(self.losses), axis=0)
        tokens = len(self.losses) * self.tokens_per_step
        return {
            "bits_per_byte": float(bits),
            "index_loss": float(index_loss),
            "tokens_per_second": tokens / (time.perf_counter() - self.since),
        }


def plot(log: Log, title: str) -> pathlib.Path:
    """Bits per byte, index recall and tokens per second over the steps; returns the PNG's path."""
    figure, (bits, recall, speed) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    bits.plot(*log.series("train", "bits_per_byte"), label="training")
    bits.plot(*log.series("validation", "bits_per_byte"), "o-", label="validation")
    bits.axhline(log.events[0]["unigram_bits_per_byte"], color="grey", ls="--", label="unigram")
    bits.set(xlabel="step", ylabel="bits per byte")
    bits.legend()
    recall.plot(*log.series("validation", "recall"), "o-")
    recall.set(xlabel="step", ylabel="share of the dense top-k that is chosen", ylim=(0, 1))
    speed.plot(*log.series("train", "tokens_per_second"))
    speed.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
    figure.suptitle(title)
    path = log.path.with_name("training.png")
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path
