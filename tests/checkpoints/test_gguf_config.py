"""Configs from GGUF metadata; bad metadata is in test_bad_files.py."""

import gguf
import numpy as np
import pytest

from peagle_jax.checkpoints import gguf_config
from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.gguf_file import open_gguf
from peagle_jax.checkpoints.hf_config import read_target_config
from peagle_jax.checkpoints.load import load_target
from peagle_jax.models.config import RopeConfig
from peagle_jax.models.rope import inverse_frequencies
from tests.tiny_gguf import write_tiny_gguf


def test_fields_of_a_llama_file(tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, metadata={"llama.rope.freq_base": 100_000.0})
    config = read_target_config(path)
    assert (config.family, config.hidden_size, config.intermediate_size) == ("llama", 64, 96)
    layer = config.layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (4, 2, 16)
    assert layer.rope == RopeConfig(theta=100_000.0)
    assert config.num_layers == 2 and config.max_positions == 128
    assert config.norm_eps == np.float32(1e-5)
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((2,), 1, 2)
    assert config.tied_embeddings
    write_tiny_gguf(path, tied=False)
    assert not read_target_config(path).tied_embeddings


def test_linear_and_yarn_scaling(tmp_path):
    path = tmp_path / "m.gguf"
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_tiny_gguf(path, metadata=scaling)
    expected = RopeConfig(kind="linear", theta=10_000.0, factor=4.0)
    assert read_target_config(path).layers[0].rope == expected
    more = {"llama.rope.scaling.original_context_length": 32}
    write_tiny_gguf(path, metadata={**scaling, "llama.rope.scaling.type": "yarn", **more})
    rope = read_target_config(path).layers[0].rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 32)
    assert rope.truncate


@pytest.fixture
def with_factors(monkeypatch):
    """Lets a tiny file be written with the tensor of rope factors that llama 3 files have."""

    def write(path, factors):
        original = gguf.GGUFWriter.write_header_to_file

        def add_then_write(self, *args, **kwargs):
            self.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
            return original(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(gguf.GGUFWriter, "write_header_to_file", add_then_write)
            write_tiny_gguf(path, metadata={"llama.rope.freq_base": 500_000.0})

    return write


def test_rope_factors_of_llama_3_become_its_settings(tmp_path, with_factors):
    settings = RopeConfig(
        kind="llama3",
        theta=500_000.0,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )
    plain, _ = inverse_frequencies(RopeConfig(theta=500_000.0), 16)
    slowed, _ = inverse_frequencies(settings, 16)
    path = tmp_path / "m.gguf"
    with_factors(path, plain / slowed)
    assert read_target_config(path).layers[0].rope == settings
    assert load_target(path).config.layers[0].rope == settings


@pytest.mark.parametrize(
    "factors", [[1, 1, 1, 1, 1, 2, 3, 4], [1, 8], [1, 1, 1, 1, 1, 1, 0, 8]], ids=str
)
def test_other_rope_factors_are_refused(tmp_path, with_factors, factors):
    path = tmp_path / "m.gguf"
    with_factors(path, factors)
    with pytest.raises(CheckpointError, match="m.gguf: tensor 'rope_freqs.weight'"):
        read_target_config(path)


def test_rope_factors_beside_a_scaling_type_are_refused(tmp_path, with_factors):
    path = tmp_path / "m.gguf"
    with_factors(path, [1] * 8)
    file = open_gguf(path)
    file.metadata["llama.rope.scaling.type"] = "linear"
    with pytest.raises(CheckpointError, match="llama.rope.scaling.type"):
        gguf_config.gguf_config(file)
