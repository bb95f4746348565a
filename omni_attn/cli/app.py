"""The command group: which commands there are, and what happens when one meets a person's mistake."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from omni_attn import __version__
from omni_attn.cli import backends, bench, check, doctor, explain, inspect, run, schema, tune
from omni_attn.cli.ranks import refuse_several, says_first
from omni_attn.errors import OmniAttnError, ParallelError

MISTAKE = 2


class _Group(TyperGroup):
    """Prints the text of an OmniAttnError to stderr and exits 2; every other exception is our bug and shows.

    Of several processes one prints what all of them meet.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OmniAttnError as error:
            told_by_another = isinstance(error, ParallelError) and error.first
            if says_first(told_by_another or str(error)):
                typer.secho(str(error), err=True, fg=typer.colors.RED)
            raise typer.Exit(error.exit_code if isinstance(error, ParallelError) else MISTAKE) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"omni-attn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Attention of diffusion transformers: choose a backend per role in a pipeline YAML, see why it runs."""
    if context.invoked_subcommand not in (None, "run"):
        refuse_several(context.invoked_subcommand)


for command in (
    *(run.run, explain.explain, doctor.doctor, check.check, backends.backends, schema.schema),
    *(bench.bench, tune.tune, inspect.inspect),
):
    app.command()(command)
