"""trtseek export CHECKPOINT --format F --output DIR: an engine checkpoint as others serve it."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.errors import StoreError

# The tables are in pipeline.exports, which imports what --help must not wait for.
FORMATS = ("hf", "awq", "compressed_tensors", "modelopt", "gguf")
OTHERS = ("refuse", "16bit")
RUN, STAGES = "run.json", ("quantize", "convert")


@click.command(name="export")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--format", "format", type=click.Choice(FORMATS), default="hf", show_default=True, help="What to write.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option(
    "--others",
    type=click.Choice(OTHERS),
    default="refuse",
    show_default=True,
    help="What to do with linears that the format cannot hold exactly.",
)
@click.option(
    "--asymmetric",
    metavar="CONFIG",
    help="AWQ of a converted checkpoint: quantize it with zero points, as stages.quantize of a config says.",
)
def command(checkpoint: Path, format: str, output: Path, others: str, asymmetric: str | None) -> None:
    """Write CHECKPOINT as a folder that others load.

    CHECKPOINT is an engine checkpoint (out/NAME/convert, out/NAME/quantize) or a run's folder, which stands for its
    last. Numbers are never rounded again: what the format cannot hold exactly is refused, or written in 16 bits.
    With --asymmetric they are found anew, by AWQ or rtn: no engine has zero points.

    \b
    hf                  Hugging Face, 16 bits; a converted checkpoint comes back bit for bit, FP8 blocks as DeepSeek's
    awq                 AutoAWQ's GEMM layout: vLLM, LMDeploy, SGLang
    compressed_tensors  llm-compressor's: vLLM, transformers
    modelopt            nvidia-modelopt's: TensorRT-LLM's PyTorch backend
    gguf                llama.cpp
    """
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.cli.source import check_calibration
    from pipeline.config.compatibility import check_quantize
    from pipeline.config.load import load_config
    from pipeline.exports.formats import export_checkpoint
    from pipeline.progress import make_reporter
    from pipeline.stages.disk import explain_disk_errors

    config = load_config(asymmetric) if asymmetric is not None else None
    engine = CheckpointFolder.open(_find(checkpoint))
    if config is not None:
        check_quantize(config, engine.architecture)
        check_calibration(config, engine.path)
    reporter = make_reporter()
    reporter.begin("export")
    try:
        with explain_disk_errors(output, only_under=output.parent):
            report = export_checkpoint(
                engine,
                output,
                format,
                others=others,
                asymmetric=config.stages.quantize if config is not None else None,
                locate=config.locate if config is not None else str,
                progress=reporter,
            )
    except StoreError as error:
        hint = "nothing was left there: name another --output, or mend this one, and export again"
        raise StoreError(error.message, hint=hint) from error
    for note in report.notes:
        reporter.note(note)
    written = ", ".join(f"{count} linears in {kind}" for kind, count in report.quantized.items())
    reporter.end(f"{format}: {written or 'all linears in 16 bits'}")
    click.echo(output)


def _find(path: Path) -> Path:
    """A run's last checkpoint, or `path` itself."""
    if not (path / RUN).is_file():
        return path
    return next((path / stage for stage in STAGES if (path / stage).is_dir()), path)
