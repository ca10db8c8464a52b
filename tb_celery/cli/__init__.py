"""The command ``tb-celery``: the workers' quota for shell scripts, cron jobs and the people who look after it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import click

from tb_celery.cli.asking import check, run, wait
from tb_celery.cli.keeping import doctor, dump, migrate, reset, status, top, verify
from tb_celery.cli.source import DONE, FAILED, INTERRUPTED, steered
from tb_celery.errors import TBCeleryError
from tb_celery.steering import commands

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST_LINE = 2000
"""Characters of a complaint: what it is about may be megabytes."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: whatever is wrong is one sentence on stderr and exit code 1."""
    code: object = FAILED
    complaint = None
    try:
        code = cli.main(args, prog_name="tb-celery", standalone_mode=False)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "tb-celery"
        complaint = f"{path}: {error.format_message().rstrip('.')}; see '{path} --help'"
    except (click.ClickException, TBCeleryError) as error:
        complaint = f"tb-celery: {error}"
    except click.Abort:
        code = INTERRUPTED
    except (OSError, UnicodeEncodeError) as error:
        complaint = f"tb-celery: the answer cannot be written: {error}"
        with suppress(AttributeError, OSError):
            # What is left in the buffer would be tried, and complained of, once more when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if complaint:
        line = " ".join(complaint.splitlines())
        if len(line) > LONGEST_LINE:
            line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
        click.echo(line, err=True)
    sys.exit(code if isinstance(code, int) else DONE)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(sys.modules["tb_celery"].__version__, prog_name="tb-celery")
def cli() -> None:
    """Ask, and look after, the quotas that this host's Celery workers share.

    Buckets come from the settings (environment TB_CELERY_*, or the file that TB_CELERY_CONFIG names), from a Celery app
    with --app, or from a JSON file with --config. All commands and workers of one user share one state file unless told
    otherwise, so a bucket of the same name is the same quota in all of them.

    Exit codes: 0 the tokens were taken, or all is well; 2 over quota; 1 anything else, and one sentence on stderr says
    what; 130 interrupted.
    """


for _command in (check, wait, run, status, top, dump, *commands(steered), reset, doctor, verify, migrate):
    cli.add_command(_command)
