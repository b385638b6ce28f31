"""DrafterConfig from a drafter's config.json: the raw EAGLE-3 layout and that of speculators.

Raw files hold everything at the top level, some of it under `eagle_config`; speculators files keep
the decoder under `transformer_layer_config`. Whatever changes the numbers is read or refused with
an error that names file and key; what is guessed is warned about. Weights: drafter_files.py.
"""

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from peagle_jax.checkpoints.drafter_keys import MASK_KEYS, HeadKeys, HeadLayout, head_keys
from peagle_jax.checkpoints.fields import CheckpointError, Fields, PathLike, read_json
from peagle_jax.checkpoints.rope_config import LAYER_TYPES, rope_config
from peagle_jax.models.config import DrafterConfig, DrafterWarning, LayerConfig, TargetConfig

TAPS_KEY = "eagle_aux_hidden_state_layer_ids"

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Settings that would change the numbers, with the values under which they do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_chunk_size": (),
    "rope_interleave": (False,),
    "clip_qkv": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
}
_UNSUPPORTED_EAGLE: dict[str, tuple[Any, ...]] = {
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (1,),
}


def read_drafter_config(
    path: PathLike,
    *,
    target_config: TargetConfig | None = None,
    tensor_names: Collection[str] | None = None,
    parallel_drafting: bool | None = None,
) -> DrafterConfig:
    """The DrafterConfig of a folder (its config.json) or of a JSON file.

    `target_config` is what the drafter must fit; without it nothing about the target can be
    checked or guessed. `tensor_names` are those of the weights (drafter_tensors.py), where known:
    they say whether the head has an embedding, a fusion and a mask vector. `parallel_drafting`
    overrides what the file says. Warns (DrafterWarning) about every guess.

    Raises CheckpointError (a ValueError) naming file, key and remedy for whatever is missing,
    contradicts itself, is not supported, or does not fit the target.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    return drafter_config(
        read_json(file),
        target_config=target_config,
        tensor_names=tensor_names,
        parallel_drafting=parallel_drafting,
    )


def drafter_config(
    config: Fields,
    *,
    target_config: TargetConfig | None = None,
    tensor_names: Collection[str] | None = None,
    parallel_drafting: bool | None = None,
) -> DrafterConfig:
    """The DrafterConfig that a parsed config.json describes; pure, reads no file."""
    head = head_keys(config)
    decoder = head.decoder
    _refuse_unsupported(config, decoder)
    _refuse_tied(head, tensor_names)
    hidden = decoder.integer("hidden_size")
    vocab = decoder.integer("vocab_size")
    style = _style(head)
    use_taps = head.flag("use_aux_hidden_state", True)
    mask = _mask_token(head)
    parallel = _parallel(head, mask, tensor_names, parallel_drafting)
    draft_vocab = head.integer("draft_vocab_size", vocab)
    result = DrafterConfig(
        style=style,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        hidden_size=hidden,
        intermediate_size=decoder.integer("intermediate_size"),
        target_hidden_size=_target_hidden_size(head, hidden, target_config),
        layers=_layers(decoder, style),
        taps=_taps(head, target_config) if use_taps else (),
        max_positions=decoder.integer("max_position_embeddings", 2048),
        norm_eps=decoder.number("rms_norm_eps"),
        norm_before_residual=_norm_before_residual(head),
        norm_before_fc=head.flag("norm_before_fc", False),
        fc_norm=head.flag("fc_norm", False),
        norm_output=head.flag("norm_output", False),
        use_taps=use_taps,
        fuse=use_taps if tensor_names is None else use_taps or "fc.weight" in tensor_names,
        attention_bias=decoder.flag("attention_bias", False),
        mlp_bias=decoder.flag("mlp_bias", False),
        activation=_activation(decoder),
        own_embedding=tensor_names is None or "embed_tokens.weight" in tensor_names,
        embedding_scale=head.number("embedding_scale", None),
        mask_token_id=mask if parallel else None,
        num_depths=head.integer("num_depths", None),
        num_speculative_tokens=_num_speculative_tokens(head),
        parallel_drafting=parallel,
        target_vocab_size=_target_vocab_size(vocab, draft_vocab, target_config),
    )
    if result.norm_before_fc and result.fc_norm:
        config.fail("fc_norm", "false, as norm_before_fc is true and the two exclude each other")
    _check_mask_token(head, result, target_config)
    _check_windows(config, result)
    if target_config is not None:
        _check_fits(config, result, target_config)
    return result


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The taps (2, L // 2, L - 3) of a head that names none, convention T.

    Raises ValueError where these are not three different layers in ascending order.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not 2 < taps[1] < taps[2]:
        raise ValueError(
            f"the usual taps (2, L // 2, L - 3) of a target with {num_layers} layers are "
            f"{list(taps)}, not three different layers; set {TAPS_KEY}"
        )
    return taps


def _refuse_unsupported(config: Fields, decoder: Fields) -> None:
    for key, neutral in _UNSUPPORTED.items():
        decoder.only(key, neutral, "not supported in a drafter")
    if config.has("eagle_config"):
        for key, neutral in _UNSUPPORTED_EAGLE.items():
            config.child("eagle_config").only(key, neutral, "not supported in a drafter")


def _refuse_tied(head: HeadKeys, names: Collection[str] | None) -> None:
    """A head tied to the drafter's own embedding; where both are stored, the key means nothing."""
    if names is None or "lm_head.weight" in names or "embed_tokens.weight" not in names:
        return
    if head.flag("tie_word_embeddings", False):
        raise CheckpointError(
            f"{head.config.where}: tie_word_embeddings: the weights hold an embedding and no "
            "lm_head.weight; write the head into the file and set the key to false"
        )


def _style(head: HeadKeys) -> Literal["llama", "qwen3"]:
    """By architecture where that tells, as vLLM does, else by model_type."""
    names = head.config.raw.get("architectures") or []
    if head.layout == "raw" and len(names) == 1 and isinstance(names[0], str):
        if "Qwen3" in names[0]:
            return "qwen3"
        if "Llama" in names[0]:
            return "llama"
    kind = head.decoder.text("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        head.decoder.fail("model_type", "'llama' or 'qwen3'")
    return kind


def _activation(decoder: Fields) -> Any:
    name = decoder.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        decoder.fail("hidden_act", f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layers(decoder: Fields, style: str) -> tuple[LayerConfig, ...]:
    hidden, heads = decoder.integer("hidden_size"), decoder.integer("num_attention_heads")
    kv_heads = decoder.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        decoder.fail("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = decoder.integer("head_dim", None)
    if head_dim is None and style == "qwen3":
        head_dim = 128
    elif head_dim is None and hidden % heads:
        decoder.fail("head_dim", f"a size, as {heads} heads do not divide hidden_size {hidden}")
    return tuple(
        LayerConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim or hidden // heads,
            rope=rope_config(decoder, kind),
            window=decoder.integer("sliding_window") if kind == "sliding_attention" else None,
        )
        for kind in _layer_types(decoder, style)
    )


def _layer_types(decoder: Fields, style: str) -> list[str]:
    """Full or sliding, layer by layer; a window whose layers are unclear is an error."""
    count = decoder.integer("num_hidden_layers")
    types = decoder.raw.get("layer_types")
    if types is not None:
        good = isinstance(types, list) and all(kind in LAYER_TYPES for kind in types)
        if good and len(types) != count and set(types) == {"full_attention"}:
            return [
                "full_attention"
            ] * count  # a list copied from the target; nothing depends on it
        if not good or len(types) != count:
            decoder.fail("layer_types", f"{count} entries out of {', '.join(LAYER_TYPES)}")
        return types
    if not decoder.has("sliding_window") or not decoder.flag(
        "use_sliding_window", style != "qwen3"
    ):
        return ["full_attention"] * count
    if style == "qwen3":
        first = decoder.integer("max_window_layers", 28, minimum=0)
        return [LAYER_TYPES[index >= first] for index in range(count)]
    decoder.fail(
        "sliding_window",
        "null, or layer_types beside it that names the layers it holds for",
    )


def _check_windows(config: Fields, result: DrafterConfig) -> None:
    """A rollout must fit into every window, or serving could not repeat what training saw."""
    windows = [layer.window for layer in result.layers if layer.window is not None]
    depth = max(result.num_depths or 1, result.num_speculative_tokens or 1)
    if result.parallel_drafting and windows and min(windows) < depth:
        raise CheckpointError(
            f"{config.where}: sliding_window: a window of {min(windows)} positions is shorter than "
            f"the {depth} tokens drafted in one pass; in training the mask rows see each other "
            "whatever the window, so serving it would not repeat what was trained"
        )


def _norm_before_residual(head: HeadKeys) -> bool:
    value = head.flag("norm_before_residual", None)
    if value is None:
        _warn(
            f"{head.config.where}: norm_before_residual is missing, taken as false; a head trained "
            "with true would draft badly: write the key into the file"
        )
    return bool(value)


def _taps(head: HeadKeys, target: TargetConfig | None) -> tuple[int, ...]:
    found = head.value(TAPS_KEY)
    where = head.config.where
    if found is None or found == []:
        if target is None:
            raise CheckpointError(
                f"{where}: {TAPS_KEY}: the key is missing, and without the target's config the "
                "usual taps cannot be worked out; set it to the tapped layers"
            )
        try:
            taps = default_taps(target.num_layers)
        except ValueError as error:
            raise CheckpointError(f"{where}: {TAPS_KEY}: the key is missing, and {error}") from None
        _warn(
            f"{where}: {TAPS_KEY} is missing, guessed as {list(taps)} for {target.num_layers} "
            "layers; a head trained on others would draft badly: write the key into the file"
        )
        return taps
    good = isinstance(found, list) and all(type(tap) is int and tap >= 0 for tap in found)
    if not good or any(a >= b for a, b in zip(found, found[1:], strict=False)):
        raise CheckpointError(
            f"{where}: {TAPS_KEY}: expected different target layers in ascending order (convention "
            f"T: 0 is the embedding output, t the input of layer t), found {found!r}"
        )
    return tuple(found)


def _mask_token(head: HeadKeys) -> int | None:
    """The mask token under whichever key; two keys that disagree are an error."""
    found = {name: value for name in MASK_KEYS if (value := head.mask_value(name)) is not None}
    for name, value in found.items():
        if type(value) is not int:
            raise CheckpointError(
                f"{head.config.where}: {name}: expected a token id, found {value!r}"
            )
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"{head.config.where}: the keys for the mask token disagree: {found}; keep one value"
        )
    return next(iter(found.values()), None)


def _parallel(
    head: HeadKeys, mask: int | None, names: Collection[str] | None, forced: bool | None
) -> bool:
    """Whether to load for parallel drafting: as forced, else what the file says of itself."""
    where, stored = head.config.where, names is not None and "mask_hidden" in names
    if head.layout == "raw":
        said = head.flag("parallel_drafting", mask is not None)
        if forced is None and stored and mask is None and not head.has("parallel_drafting"):
            raise CheckpointError(
                f"{where}: the weights hold mask_hidden, so the head was trained for parallel "
                f"drafting, but no key names its mask token; add ptd_token_id, or load with "
                "parallel_drafting=False"
            )
    else:
        said = head.layout == "peagle"
    parallel = said if forced is None else forced
    if parallel and mask is None:
        raise CheckpointError(
            f"{where}: parallel drafting needs a mask token, and none of {', '.join(MASK_KEYS)} is "
            "there; add ptd_token_id with the id the head was trained with"
        )
    if parallel and names is not None and not stored:
        raise CheckpointError(
            f"{where}: parallel drafting needs the tensor mask_hidden, and the weights have none; "
            "use a head trained for parallel drafting, or load with parallel_drafting=False and "
            "draft with method eagle3"
        )
    if stored and not parallel:
        _warn(f"{where}: mask_hidden is left out, as the head is not loaded for parallel drafting")
    return parallel


def _target_hidden_size(head: HeadKeys, hidden: int, target: TargetConfig | None) -> int:
    """As said; else the draft's own width (speculators) or the target's (raw, as vLLM does)."""
    usual = hidden if head.layout != "raw" or target is None else target.hidden_size
    return head.integer("target_hidden_size", usual)


def _target_vocab_size(vocab: int, draft_vocab: int, target: TargetConfig | None) -> int | None:
    """How many ids the target can emit, where the draft vocabulary may reach beyond them."""
    size = vocab if target is None else min(vocab, target.vocab_size)
    return size if draft_vocab > size or vocab > size else None


def _num_speculative_tokens(head: HeadKeys) -> int | None:
    direct = head.integer("num_speculative_tokens", None)
    if direct is not None or not head.config.has("speculators_config"):
        return direct
    proposals = head.config.child("speculators_config")
    methods = proposals.raw.get("proposal_methods")
    if not methods:
        return None
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        proposals.fail("proposal_methods", "a list of objects")
    inside = Fields(methods[0], proposals.where, f"{proposals.prefix}proposal_methods[0].")
    return inside.integer("speculative_tokens", None)


def _check_mask_token(head: HeadKeys, result: DrafterConfig, target: TargetConfig | None) -> None:
    mask, where = result.mask_token_id, head.config.where
    if mask is None:
        return
    if not 0 <= mask < result.vocab_size:
        raise CheckpointError(
            f"{where}: the mask token {mask} lies outside the drafter's vocabulary "
            f"(0..{result.vocab_size - 1}); set ptd_token_id to an unused id within it"
        )
    if target is None:
        return
    used = {"pad_token_id": target.pad_token_id, "bos_token_id": target.bos_token_id}
    used |= {"eos_token_id": mask if mask in target.eos_token_ids else None}
    for key, token in used.items():
        if token == mask:
            raise CheckpointError(
                f"{where}: the mask token {mask} is the target's {key}, so a token in use; set "
                "ptd_token_id to an unused id and train with that"
            )


def _check_fits(config: Fields, result: DrafterConfig, target: TargetConfig) -> None:
    where, layers = config.where, target.num_layers
    if result.taps and result.taps[-1] > layers:
        raise CheckpointError(
            f"{where}: {TAPS_KEY}: {list(result.taps)} do not fit a target with {layers} layers "
            f"(0..{layers}, convention T); this head belongs to another target"
        )
    if result.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{where}: target_hidden_size: the head reads states of width "
            f"{result.target_hidden_size}, the target's are {target.hidden_size} wide; this head "
            "belongs to another target"
        )
    if result.vocab_size < target.vocab_size:
        raise CheckpointError(
            f"{where}: vocab_size: the drafter knows {result.vocab_size} tokens, the target can "
            f"emit {target.vocab_size}; this head belongs to another target"
        )
    if result.max_positions < target.max_positions:
        _warn(
            f"{where}: max_position_embeddings: {result.max_positions} is below the target's "
            f"{target.max_positions}; rotary angles are extended, but the drafter was not "
            "configured for such positions and may draft worse there"
        )


def _warn(message: str) -> None:
    warnings.warn(message, DrafterWarning, stacklevel=2)


__all__ = [
    "TAPS_KEY",
    "DrafterWarning",
    "HeadLayout",
    "default_taps",
    "drafter_config",
    "read_drafter_config",
]
