"""What the scripts read from their command lines in the same way: lists of words, and the device they run on."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping

import torch


def split_lists(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    lists: Mapping[str, Collection[str] | None],
) -> None:
    """Puts lists of words in place of words with commas between them; exits with a sentence on unknown ones.

    Args:
        parser: says what is wrong.
        arguments: are changed.
        lists: argument -> the words there are, None = any.
    """
    for name, known in lists.items():
        words = [word for word in getattr(arguments, name).split(",") if word]
        setattr(arguments, name, words)
        if known is not None and (unknown := set(words) - set(known)):
            parser.error(f"--{name}: no such {name}: {', '.join(sorted(unknown))}. Known: {', '.join(known)}")


def this_device() -> torch.device:
    """The current NVIDIA GPU, or the CPU of a machine without one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_of(*, toy: bool) -> torch.device:
    """This machine's device; exits with a sentence where the real size would meet a CPU."""
    device = this_device()
    if device.type == "cpu" and not toy:
        raise SystemExit("needs an NVIDIA GPU, found none: --toy runs a small case on a CPU")
    return device
