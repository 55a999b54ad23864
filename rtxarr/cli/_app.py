"""The commands and their options; what they do is imported when they run."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

app = typer.Typer(
    help="Train the recipes of rtxarr and look at what this machine has.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        import rtxarr

        typer.echo(f"rtxarr {rtxarr.__version__}")
        raise typer.Exit


class _Train(TyperCommand):
    """Says how a setting is given where it is taken for an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as caught:  # NoSuchOption, which is click's or typer's own
            from rtxarr.cli import _train

            error: Any = caught
            key = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
            if _train.is_setting(key):
                error.message += f": settings of a recipe are given as --set {key}=VALUE"
            raise


@app.callback(invoke_without_command=True)
def _rtx(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(cls=_Train)
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(help="gcn-cora (the default) or another one of --list."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu or cuda:0.", show_default="auto"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of parameters, order and dropout.", show_default="0", min=0, max=2**63),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run, with its settings.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for what the run leaves; new or empty, unless --resume.",
            show_default="runs/RECIPE, numbered when taken",
        ),
    ] = None,
    capture: Annotated[
        bool | None,
        typer.Option(
            "--capture/--no-capture",
            help="Replay steps as CUDA graphs: faster, and the same results.",
            show_default="on a GPU",
        ),
    ] = None,
    fuse: Annotated[
        bool | None,
        typer.Option(
            "--fuse/--no-fuse",
            help="Fuse the kernels of steps: faster once they are compiled.",
            show_default="on a GPU, where it is faster",
        ),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the recipes and their settings.")
    ] = False,
) -> None:
    """Train a recipe on real data, with metrics, checkpoints and pictures."""
    from rtxarr.cli import _train

    if show_list:
        raise typer.Exit(_train.show_recipes(recipe))
    status = _train.train(
        recipe,
        device=device,
        seed=seed,
        settings=settings or [],
        resume=resume,
        out=out,
        capture=capture,
        fuse=fuse,
    )
    raise typer.Exit(status)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, devices, what is missing and the command that installs it."""
    from rtxarr.cli import _info

    typer.echo(_info.as_json() if as_json else _info.as_text())
