"""Rotary positions in config.json, as transformers 4 spells them (rope_theta, rope_scaling) and 5 (rope_parameters)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxlite.config.key_groups import ROPE_KEYS
from maxlite.config.schema import KEYS, ModelConfig
from maxlite.config.values import describe_allowed, parse_value
from maxlite.hf.family_fields import ConfigReader, Json, ModelKeys

FULL, SLIDING = "full_attention", "sliding_attention"
PROPORTIONAL = "proportional"
# Our keys -> theirs.
_NAMES = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "rope_mscale_all_dim": "mscale_all_dim",
    "rope_truncate": "truncate",
    "rope_attention_factor": "attention_factor",
}
# What may be left out, with the value that it then has. The others must be there.
_DEFAULTS = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": None,
    "rope_mscale_all_dim": None,
    "rope_truncate": True,
    "rope_attention_factor": None,
}
_PARTIAL = "partial_rotary_factor"
_WHOLE_HEADS = "this family turns whole heads, so it must be 1"


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary keys of a family.

    theta: the base of a config.json that names none. local_theta: that of sliding layers. nested: rope_parameters
    has one entry for full and one for sliding layers, and the old spelling scales the full ones only. local_name: the
    old spelling's key for the base of the sliding layers. absent: the parameters of a config.json without any.
    new_only: the family is younger than the old spelling, which transformers would pass over. partial: the share of a
    head that turns in a config.json that does not say it; None: the family turns whole heads.
    """

    theta: float = 10000.0
    nested: bool = False
    local_theta: float | None = None
    local_name: str | None = None
    absent: Mapping[str, Any] | None = None
    new_only: bool = False
    partial: float | None = None

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads all rotary keys, from either spelling, or from both if they agree."""
        partial = reader.take_given("partial_rotary_factor")
        if self.partial is None and partial not in (None, 1):
            reader.refuse(f"partial_rotary_factor={partial!r} is not supported; {_WHOLE_HEADS}")
        new = self._new_spelling(reader, keys)
        old = None if self.new_only else self._old_spelling(reader, keys)
        if new is not None and old is not None:
            # Of the old spelling only what was said counts: no word about scaling is no word against it.
            scaled = reader.take_given("rope_scaling") is not None
            for name in sorted(name for name in old if scaled or name.endswith("timescale")):
                if new.get(name, old[name]) != old[name]:
                    reader.refuse(
                        f"rope_parameters and the old keys for rotary positions differ: {name} is {new[name]} "
                        f"and {old[name]}"
                    )
        read = new or old or self._flat(self.absent or {}, "rope_parameters", reader, keys)
        read.setdefault("rope_max_timescale", self.theta)
        if self.partial is not None:
            share = self.partial if partial is None else _parse(_PARTIAL, partial, _PARTIAL, reader)
            if read.setdefault(_PARTIAL, share) != share and partial is not None:
                reader.refuse(f"partial_rotary_factor={partial!r}, but in rope_parameters it is {read[_PARTIAL]!r}")
        if self.nested:
            local = self.local_theta if self.local_theta is not None else read["rope_max_timescale"]
            read.setdefault("local_rope_max_timescale", local)
        keys.update(read)

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes the new spelling."""
        full = {"rope_type": model.rope_type, "rope_theta": model.rope_max_timescale}
        if model.rope_type == PROPORTIONAL or self.partial is not None:
            full |= {_PARTIAL: model.partial_rotary_factor}
        for key in ROPE_KEYS[model.rope_type]:
            # What older versions have no word for is written only where it says something.
            value = getattr(model, key)
            defaults = _defaults(model.rope_type)
            if key not in defaults or key in ("beta_fast", "beta_slow") or value != defaults[key]:
                full[_NAMES[key]] = value
        if not self.nested:
            json["rope_parameters"] = full
            return
        local = model.local_rope_max_timescale
        sliding = dict(full) if local is None else {"rope_type": "default", "rope_theta": local}
        json["rope_parameters"] = {FULL: full, SLIDING: sliding}

    def _new_spelling(self, reader: ConfigReader, keys: ModelKeys) -> ModelKeys | None:
        given = _take_object("rope_parameters", reader)
        if not given:
            return None
        if not self.nested:
            return self._flat(given, "rope_parameters", reader, keys)
        if given.keys() - {FULL, SLIDING} or not all(isinstance(value, dict | None) for value in given.values()):
            reader.refuse(f"rope_parameters of this family holds the objects {FULL} and {SLIDING}, not {sorted(given)}")
            return None
        full = self._flat(given.get(FULL) or {}, f"rope_parameters.{FULL}", reader, keys)
        sliding = self._flat(given.get(SLIDING) or {}, f"rope_parameters.{SLIDING}", reader, keys)
        full.setdefault("rope_max_timescale", self.theta)
        sliding.setdefault("rope_max_timescale", self.theta if self.local_theta is None else self.local_theta)
        if sliding == full:
            return {**full, "local_rope_max_timescale": None}
        if sliding["rope_type"] != "default":
            reader.refuse(
                f"rope_parameters.{SLIDING} is scaled, and not as {FULL} is: sliding layers may have another "
                "rope_theta, or the same scaling, and no scaling of their own"
            )
        return {**full, "local_rope_max_timescale": sliding["rope_max_timescale"]}

    def _old_spelling(self, reader: ConfigReader, keys: ModelKeys) -> ModelKeys | None:
        scaling, theta = _take_object("rope_scaling", reader), reader.take_given("rope_theta")
        local = None if self.local_name is None else reader.take_given(self.local_name)
        if not scaling and theta is None and local is None:
            return None
        given = dict(scaling or self.absent or {})
        if theta is not None and given.setdefault("rope_theta", theta) != theta:
            reader.refuse(f"rope_theta={theta!r} and rope_scaling.rope_theta={given['rope_theta']!r} differ")
        read = self._flat(given, "rope_scaling" if scaling else "rope_theta", reader, keys)
        if local is not None:
            read["local_rope_max_timescale"] = _parse("local_rope_max_timescale", local, str(self.local_name), reader)
        return read

    def _flat(self, given: Mapping[str, Any], name: str, reader: ConfigReader, keys: ModelKeys) -> ModelKeys:
        """Our keys for one object of parameters; a base that it does not name is left out."""
        kinds = [given[word] for word in ("rope_type", "type") if given.get(word) is not None] or ["default"]
        if kinds[0] != kinds[-1]:
            reader.refuse(f"{name}: rope_type={kinds[0]!r} and type={kinds[-1]!r} differ")
        if not isinstance(kinds[0], str) or kinds[0] not in ROPE_KEYS:
            reader.refuse(f"{name}: rope_type={kinds[0]!r} is not supported; it may be {', '.join(ROPE_KEYS)}")
            return {"rope_type": "default"}
        read: ModelKeys = {"rope_type": kinds[0]}
        if given.get("rope_theta") is not None:
            read["rope_max_timescale"] = _parse("rope_max_timescale", given["rope_theta"], name, reader)
        partial = given.get("partial_rotary_factor")
        if kinds[0] == PROPORTIONAL:
            share = 1.0 if partial is None else partial
            read[_PARTIAL] = _parse(_PARTIAL, share, name, reader)
        elif self.partial is not None:
            read |= {} if partial is None else {_PARTIAL: _parse(_PARTIAL, partial, f"{name}.{_PARTIAL}", reader)}
        elif partial not in (None, 1):
            reader.refuse(f"{name}.partial_rotary_factor={partial!r} is not supported; {_WHOLE_HEADS}")
        for key in ROPE_KEYS[kinds[0]]:
            read[key] = _read_parameter(key, given, name, reader)
        if read.get("original_max_position_embeddings", 1) is None:
            read["original_max_position_embeddings"] = keys["max_position_embeddings"]
        if read.get("rope_factor", 1) is None:
            # Some files leave the factor to the two lengths.
            read["rope_factor"] = keys["max_position_embeddings"] / read["original_max_position_embeddings"]
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"} | {
            _NAMES[key] for key in read if key in _NAMES
        }
        if unknown := [word for word, value in given.items() if word not in known and value is not None]:
            reader.refuse(f"{name}: rope_type={kinds[0]} has no use for {', '.join(unknown)}")
        if self.nested and read.get("rope_truncate") is False:
            reader.refuse(f"{name}: truncate=false is not read by transformers for this family; leave it out")
        return read


def _defaults(kind: Any) -> dict[str, Any]:
    return _DEFAULTS | {"rope_factor": 1.0} if kind == PROPORTIONAL else _DEFAULTS


def _take_object(name: str, reader: ConfigReader) -> dict[str, Any] | None:
    given = reader.take_given(name)
    if given is not None and not isinstance(given, dict):
        reader.refuse(f"{name}={given!r}: it must be an object or null")
        return None
    return given


def _read_parameter(key: str, given: Mapping[str, Any], name: str, reader: ConfigReader) -> Any:
    """The value of one of our keys; None for a length that is left out, and for yarn's factor."""
    theirs = _NAMES[key]
    value = given.get(theirs)
    if key == "original_max_position_embeddings":
        outer = reader.take_given(theirs)
        if outer is not None and value not in (None, outer):
            reader.refuse(f"{theirs}={outer!r} and {name}.{theirs}={value!r} differ")
        value = value if outer is None else outer
        if value is None:
            return None
    if value is None or (key in ("beta_fast", "beta_slow") and value == 0):
        if key == "rope_factor" and "yarn" in (given.get("rope_type"), given.get("type")):
            return None
        defaults = _defaults(given.get("rope_type"))
        if key not in defaults:
            reader.refuse(f"{name}: {theirs} is missing")
            return 1.0
        return defaults[key]
    return _parse(key, value, f"{name}.{theirs}", reader)


def _parse(key: str, value: Any, name: str, reader: ConfigReader) -> Any:
    try:
        if isinstance(value, str):
            raise ValueError("text")
        return parse_value(KEYS[key], value)
    except ValueError as error:
        reader.refuse(f"{name}={value!r}: {error}; it must be {describe_allowed(KEYS[key])}")
        return 1
