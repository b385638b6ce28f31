"""Where a drafter's config.json keeps the settings of the head, layout by layout.

The same key is found at the top level, under `eagle_config`, or under `transformer_layer_config`,
depending on who wrote the file. Places that disagree are an error.
"""

import dataclasses
from typing import Any, Literal

from peagle_jax.checkpoints.fields import CheckpointError, Fields

HeadLayout = Literal["raw", "peagle", "eagle3"]

# vLLM's order of keys for the mask token.
MASK_KEYS = (
    "dflash_config.mask_token_id",
    "mask_token_id",
    "dspark_noise_token_id",
    "pard_token",
    "ptd_token_id",
)


@dataclasses.dataclass(frozen=True)
class HeadKeys:
    """One drafter config: its layout, the object that describes the decoder, and all places.

    `layout` is raw, or the speculators algorithm. `places` are searched for settings of the head.
    """

    layout: HeadLayout
    config: Fields
    decoder: Fields
    places: tuple[Fields, ...]

    def has(self, key: str) -> bool:
        """Whether some place has `key` with a value other than null."""
        return any(place.has(key) for place in self.places)

    def value(self, key: str) -> Any:
        """The raw value of `key` wherever it stands, or None; CheckpointError where two differ."""
        found = self._place(key)
        return None if found is None else found.raw[key]

    def flag(self, key: str, default: bool | None) -> Any:
        """True or false, or the default."""
        found = self._place(key)
        return default if found is None else found.flag(key)

    def integer(self, key: str, default: int | None) -> Any:
        """A positive integer, or the default."""
        found = self._place(key)
        return default if found is None else found.integer(key)

    def number(self, key: str, default: float | None) -> Any:
        """A positive number, or the default."""
        found = self._place(key)
        return default if found is None else found.number(key)

    def mask_value(self, name: str) -> Any:
        """The raw value under one of MASK_KEYS, or None."""
        outer, _, key = name.rpartition(".")
        if not outer:
            return self.value(key)
        return self.config.child(outer).raw.get(key) if self.config.has(outer) else None

    def _place(self, key: str) -> Fields | None:
        found = [place for place in self.places if place.has(key)]
        for other in found[1:]:
            if other.raw[key] != found[0].raw[key]:
                raise CheckpointError(
                    f"{self.config.where}: {found[0].prefix}{key} is {found[0].raw[key]!r} and "
                    f"{other.prefix}{key} is {other.raw[key]!r}; keep one value"
                )
        return found[0] if found else None


def head_keys(config: Fields) -> HeadKeys:
    """Recognise the layout; CheckpointError for a speculators algorithm that is none of ours."""
    places = [config]
    if config.has("eagle_config"):
        places.append(config.child("eagle_config"))
    if not config.has("speculators_model_type"):
        if config.has("speculators_config"):
            config.fail("speculators_model_type", "'peagle' or 'eagle3'")
        return HeadKeys("raw", config, config, tuple(places))
    layout = config.text("speculators_model_type")
    if layout not in ("peagle", "eagle3"):
        config.fail("speculators_model_type", "'peagle' or 'eagle3'")
    decoder = config.child("transformer_layer_config")
    return HeadKeys(layout, config, decoder, (*places, decoder))
