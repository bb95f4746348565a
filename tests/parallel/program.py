"""A program for torchrun: it does the piece of work that it is given the name of, and fails as a program does."""

from __future__ import annotations

import sys

from omni_attn.errors import OmniAttnError, ParallelError
from omni_attn.parallel import ParallelConfig, connected
from tests.parallel import work


def main(degree: int, name: str, *ranks: int) -> None:
    with connected(ParallelConfig(ulysses_degree=degree, timeout_seconds=60), "cpu") as parallel:
        result = getattr(work, name)(parallel, *ranks)
        print(f"rank {parallel.rank} came through: {result}")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
    except OmniAttnError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, ParallelError) else 2)
