"""``python -m tb_celery``, and what ``tb-celery`` runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command. Ctrl-C ends it as it ends any program, also before all that it needs is there."""
    try:
        from tb_celery.cli import main as run  # noqa: PLC0415 - takes longer than most commands

        run(args)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
