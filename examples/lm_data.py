"""The text of train_lm.py: the Python standard library as bytes, split by file in two.

Whether a file is for validation depends on its relative path alone: the split is the same in every
run. The validation set is the same 65 536 bytes for every preset, seed and control.
"""

import dataclasses
import hashlib
import math
import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np

VALIDATION_SHARE = 20  # one file in so many
# The validation set: pieces at even distances of all validation files, each a whole number of
# windows of any preset.
PIECES, PIECE_BYTES = 8, 8192
# Installed packages are not the library; its tests are large and unlike the rest.
EXCLUDED = {"site-packages", "test", "tests", "idle_test"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """``train [N]`` and ``validation [8, 8193]``, a piece and the byte that follows it; uint8."""

    train: np.ndarray
    validation: np.ndarray


def load(directory: str | None = None) -> Corpus:
    """Reads the ``*.py`` files under a directory.

    Args:
        directory: where to look; default: the standard library of the running interpreter.

    Raises:
        FileNotFoundError: no such directory, or too little source text in it.
    """
    root = pathlib.Path(directory or sysconfig.get_paths()["stdlib"])
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*.py")}
    names = [n for n in files if not EXCLUDED & set(n.split("/"))]
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name in sorted(names, key=_digest):
        parts[_digest(name) % VALIDATION_SHARE == 0].append(files[name].read_bytes())
    train, validation = (np.frombuffer(b"".join(parts[k]), np.uint8) for k in (False, True))
    wanted = PIECES * PIECE_BYTES
    if min(len(train), len(validation)) <= wanted:
        raise FileNotFoundError(
            f"{root}: found {len(train)} bytes of *.py files to train on and {len(validation)} to "
            f"validate, want more than {wanted} of each; name a directory of Python source files "
            "with --data DIR"
        )
    starts = np.linspace(0, len(validation) - PIECE_BYTES - 1, PIECES).astype(int)
    return Corpus(train, np.stack([validation[s : s + PIECE_BYTES + 1] for s in starts]))


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def training_batches(corpus: Corpus, batch: int, context: int, seed: int) -> Iterator[np.ndarray]:
    """Windows at random places of the training text without end, ``[batch, context + 1]`` uint8."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(corpus.train) - context, batch)
        yield corpus.train[starts[:, None] + np.arange(context + 1)]


def validation_batches(corpus: Corpus, batch: int, context: int) -> np.ndarray:
    """The validation set, ``[N, batch, context + 1]`` uint8: each byte is predicted once.

    Raises:
        ValueError: it does not divide into such batches.
    """
    windows = PIECES * PIECE_BYTES // context
    if PIECE_BYTES % context or windows % batch:
        raise ValueError(
            f"got {batch} windows of {context} bytes, want a context that divides {PIECE_BYTES} "
            f"and a batch that divides {windows}; change the preset"
        )
    starts = np.arange(0, PIECE_BYTES, context)
    batches = corpus.validation[:, starts[:, None] + np.arange(context + 1)]
    return batches.reshape(-1, batch, context + 1)


def unigram_bits(corpus: Corpus) -> float:
    """Bits per byte of the validation set by a model that knows the training text's byte counts."""
    counts = np.bincount(corpus.train, minlength=256) + 1  # add-one smoothing
    bits = -np.log2(counts / counts.sum())[corpus.validation[:, 1:]]
    return math.fsum(bits.ravel()) / bits.size
