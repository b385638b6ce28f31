"""`peagle convert`: a target to plain safetensors, or a drafter to a layout that vLLM loads."""

import argparse
from pathlib import Path

from peagle_jax.cli_flags import UsageError

_DRAFTER_KEYS = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "ptd_token_id",
    "pard_token",
    "speculators_model_type",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder, .gguf file, or name")
    parser.add_argument("destination", help="a folder that does not exist yet, or is empty")
    parser.add_argument("--kind", choices=("auto", "target", "drafter"), default="auto")
    group = parser.add_argument_group("targets")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: lose nothing")
    group.add_argument(
        "--fused-experts", action="store_true", help="qwen3_moe experts as two tensors per layer"
    )
    group = parser.add_argument_group("drafters")
    group.add_argument("--layout", choices=("raw", "speculators"), help="default raw")
    group.add_argument("--target", help="folder of the drafter's target, to check against")
    group.add_argument("--verifier", help="the target's name, as the speculators layout records it")


def run(arguments: argparse.Namespace) -> int:
    from peagle_jax.checkpoints.hf_config import read_target_config
    from peagle_jax.checkpoints.shipped_heads import heads_folder, is_packed_head, shipped_heads
    from peagle_jax.loading import find_target

    shipped = arguments.source in shipped_heads()
    source = heads_folder() / arguments.source if shipped else find_target(arguments.source)
    drafter = arguments.kind == "drafter" or (arguments.kind == "auto" and is_drafter(source))
    wrong = ("dtype", "fused_experts") if drafter else ("layout", "target", "verifier")
    for name in wrong:
        if getattr(arguments, name):
            kind = "drafter" if drafter else "target"
            raise UsageError(f"--{name.replace('_', '-')} has no meaning for a {kind} ({source})")
    if drafter and is_packed_head(source):
        written = _unpack(source, arguments)
    elif drafter:
        from peagle_jax.checkpoints.drafter_export import convert_drafter

        config = None
        if arguments.target is not None:
            config = read_target_config(find_target(arguments.target))
        written = convert_drafter(
            source,
            arguments.destination,
            arguments.layout or "raw",
            target_config=config,
            verifier=arguments.verifier or arguments.target,
        )
    else:
        from peagle_jax.checkpoints.convert import convert_target

        written = convert_target(
            source,
            arguments.destination,
            dtype=arguments.dtype,
            fused_experts=arguments.fused_experts,
        )
    size = sum(file.stat().st_size for file in Path(written).iterdir())
    print(f"{written}: {'drafter' if drafter else 'target'}, {size / 1e6:.1f} MB")
    return 0


def _unpack(source: Path, arguments: argparse.Namespace) -> Path:
    """A head as it comes with the package, made whole with its target's embedding and head."""
    from peagle_jax.checkpoints.drafter_export import save_drafter
    from peagle_jax.checkpoints.load import load_target
    from peagle_jax.checkpoints.shipped_heads import load_shipped_head, packed_target
    from peagle_jax.loading import find_target

    name = arguments.target or packed_target(source)
    target = load_target(find_target(name), dtype="float32")
    return save_drafter(
        load_shipped_head(source, target),
        arguments.destination,
        arguments.layout or "raw",
        verifier=arguments.verifier or name,
    )


def is_drafter(source: Path) -> bool:
    """Whether a folder's config.json is that of a drafter."""
    from peagle_jax.checkpoints.fields import read_json

    config = Path(source) / "config.json"
    if not config.is_file():
        return False
    raw = read_json(config).raw
    names = raw.get("architectures") or []
    return any(key in raw for key in _DRAFTER_KEYS) or any("agle" in str(name) for name in names)
