"""Whether torchrun started this process, and as which of how many. Without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torch.distributed would ask for


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together: its number and theirs, in all and on this machine."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int | None = None
    num_local_ranks: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it speaks for all."""
        return self.rank == 0


def launch() -> Launch:
    """As the environment says now; alone where it does not say all."""
    if not all(os.environ.get(name) for name in NEEDED) or int(os.environ["WORLD_SIZE"]) < 2:
        return Launch()
    local_rank = os.environ.get("LOCAL_RANK")
    return Launch(
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        None if local_rank is None else int(local_rank),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
