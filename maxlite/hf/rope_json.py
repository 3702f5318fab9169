"""Rotary positions in config.json, as transformers 4 spells them (rope_theta, rope_scaling) and 5 (rope_parameters)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import KEYS, ModelConfig
from maxlite.config.values import describe_allowed, parse_value
from maxlite.hf.family_canonical import ROPE_KEYS
from maxlite.hf.family_fields import ABSENT, ConfigReader, Json, ModelKeys

FULL, SLIDING = "full_attention", "sliding_attention"
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
_WHOLE_HEADS = "this family turns whole heads, so it must be 1"


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary keys of a family.

    theta: the base of a config.json that names none. local_theta: that of sliding layers. nested: rope_parameters
    has one entry for full and one for sliding layers, and the old spelling scales the full ones only. local_name: the
    old spelling's key for the base of the sliding layers. absent: the parameters of a config.json without any.
    """

    theta: float = 10000.0
    nested: bool = False
    local_theta: float | None = None
    local_name: str | None = None
    absent: Mapping[str, Any] | None = None

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads all rotary keys, from either spelling, or from both if they agree."""
        if (partial := reader.take("partial_rotary_factor")) not in (ABSENT, None, 1):
            reader.refuse(f"partial_rotary_factor={partial!r} is not supported; {_WHOLE_HEADS}")
        new, old = self._new_spelling(reader, keys), self._old_spelling(reader, keys)
        if new is not None and old is not None:
            # Of the old spelling only what was said counts: no word about scaling is no word against it.
            said = old if reader.take("rope_scaling") else {k: v for k, v in old.items() if k.endswith("timescale")}
            for name in sorted(said):
                if new.get(name, said[name]) != said[name]:
                    reader.refuse(
                        f"rope_parameters and the old keys for rotary positions differ: {name} is {new[name]} "
                        f"and {old[name]}"
                    )
        read = new if new is not None else old
        if read is None:
            read = self._flat(dict(self.absent or {}), "rope_parameters", reader, keys)
        read.setdefault("rope_max_timescale", self.theta)
        if self.nested:
            local = self.local_theta if self.local_theta is not None else read["rope_max_timescale"]
            read.setdefault("local_rope_max_timescale", local)
        keys.update(read)

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes the new spelling."""
        full = {"rope_type": model.rope_type, "rope_theta": model.rope_max_timescale}
        for key in ROPE_KEYS[model.rope_type]:
            # What older versions have no word for is written only where it says something.
            if (value := getattr(model, key)) != _DEFAULTS.get(key, ABSENT) or key in ("beta_fast", "beta_slow"):
                full[_NAMES[key]] = value
        if not self.nested:
            json["rope_parameters"] = full
            return
        local = model.local_rope_max_timescale
        sliding = dict(full) if local is None else {"rope_type": "default", "rope_theta": local}
        json["rope_parameters"] = {FULL: full, SLIDING: sliding}

    def _new_spelling(self, reader: ConfigReader, keys: ModelKeys) -> ModelKeys | None:
        given = reader.take("rope_parameters")
        if given is ABSENT or given is None or given == {}:
            return None
        if not isinstance(given, dict):
            reader.refuse(f"rope_parameters={given!r}: it must be an object")
            return None
        if not self.nested:
            return self._flat(given, "rope_parameters", reader, keys)
        if given.keys() - {FULL, SLIDING}:
            reader.refuse(f"rope_parameters of this family has the keys {FULL} and {SLIDING}, not {sorted(given)}")
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
        scaling, theta = reader.take("rope_scaling"), reader.take("rope_theta")
        local = reader.take(self.local_name) if self.local_name is not None else ABSENT
        if scaling is not ABSENT and scaling is not None and not isinstance(scaling, dict):
            reader.refuse(f"rope_scaling={scaling!r}: it must be an object or null")
            scaling = None
        if not scaling and theta in (ABSENT, None) and local in (ABSENT, None):
            return None
        given = dict(scaling or {} if scaling is not ABSENT else {})
        if not given and self.absent is not None:
            given = dict(self.absent)
        if theta not in (ABSENT, None):
            if given.setdefault("rope_theta", theta) != theta:
                reader.refuse(f"rope_theta={theta!r} and rope_scaling.rope_theta={given['rope_theta']!r} differ")
        read = self._flat(given, "rope_scaling", reader, keys)
        if local not in (ABSENT, None):
            number = self._number("local_rope_max_timescale", local, self.local_name or "", reader)
            read["local_rope_max_timescale"] = number
        return read

    def _flat(self, given: Mapping[str, Any], name: str, reader: ConfigReader, keys: ModelKeys) -> ModelKeys:
        """Our keys for one object of parameters."""
        if given.get("rope_type", given.get("type")) != given.get("type", given.get("rope_type")):
            reader.refuse(f"{name}: rope_type={given['rope_type']!r} and type={given['type']!r} differ")
        kind = given.get("rope_type", given.get("type")) or "default"
        if kind not in ROPE_KEYS:
            reader.refuse(f"{name}: rope_type={kind!r} is not supported; it may be {', '.join(ROPE_KEYS)}")
            return {"rope_type": "default"}
        read: ModelKeys = {"rope_type": kind}
        if given.get("rope_theta") is not None:
            read["rope_max_timescale"] = self._number("rope_max_timescale", given["rope_theta"], name, reader)
        if given.get("partial_rotary_factor", 1.0) not in (None, 1):
            reader.refuse(
                f"{name}.partial_rotary_factor={given['partial_rotary_factor']!r} is not supported; {_WHOLE_HEADS}"
            )
        for key in ROPE_KEYS[kind]:
            read[key] = self._parameter(key, given, name, reader, keys)
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(_NAMES[key] for key in ROPE_KEYS[kind])}
        unknown = [word for word, value in given.items() if word not in known and value is not None]
        if unknown:
            reader.refuse(f"{name}: rope_type={kind} has no use for {', '.join(unknown)}")
        if self.nested and read.get("rope_truncate") is False:
            reader.refuse(f"{name}: truncate=false is not read by transformers for this family; leave it out")
        return read

    def _parameter(self, key: str, given: Mapping[str, Any], name: str, reader: ConfigReader, keys: ModelKeys) -> Any:
        value, theirs = given.get(_NAMES[key]), _NAMES[key]
        length = keys["max_position_embeddings"]
        if key == "original_max_position_embeddings":
            outer = reader.take(theirs)
            if outer not in (ABSENT, None):
                if value not in (None, outer):
                    reader.refuse(f"{theirs}={outer!r} and {name}.{theirs}={value!r} differ")
                value = outer
            value = length if value is None else value
        if key == "rope_factor" and value is None and given.get("original_max_position_embeddings"):
            # Some files leave the factor to be worked out.
            value = length / given["original_max_position_embeddings"] if given.get("rope_type") == "yarn" else None
        if value is None or (key in ("beta_fast", "beta_slow") and value == 0):
            if key not in _DEFAULTS:
                reader.refuse(f"{name}: {theirs} is missing")
            return _DEFAULTS.get(key, 1.0)
        return self._number(key, value, f"{name}.{theirs}", reader)

    @staticmethod
    def _number(key: str, value: Any, name: str, reader: ConfigReader) -> Any:
        try:
            if isinstance(value, str):
                raise ValueError("text")
            return parse_value(KEYS[key], value)
        except ValueError as error:
            reader.refuse(f"{name}={value!r}: {error}; it must be {describe_allowed(KEYS[key])}")
            return 1.0
