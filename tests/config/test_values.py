import pytest

from maxlite.config.quant_schema import QuantRule
from maxlite.config.schema import KEYS
from maxlite.config.values import describe_allowed, parse_value, plain_value


@pytest.mark.parametrize(
    ("raw", "value"),
    [("1e-4", 1e-4), ("1.e-4", 1e-4), ("1E-4", 1e-4), (".0001", 1e-4), ("3", 3.0), (3, 3.0), (1e-4, 1e-4), ("0", 0.0)],
)
def test_numbers_however_written(raw, value):
    parsed = parse_value(KEYS["learning_rate"], raw)
    assert parsed == value and type(parsed) is float


@pytest.mark.parametrize("raw", ["abc", "", "nan", "inf", "-1", "1_0", "٣", True, None, [1], 10**400, "1" + "0" * 400])
def test_not_a_learning_rate(raw):
    with pytest.raises(ValueError):
        parse_value(KEYS["learning_rate"], raw)


@pytest.mark.parametrize("raw", ["False", "false", "FALSE", " false ", False])
def test_false_is_false(raw):
    assert parse_value(KEYS["packing"], raw) is False


@pytest.mark.parametrize("raw", ["maybe", "0", "1", 0, 1, "", "no", "yes", None])
def test_neither_true_nor_false(raw):
    with pytest.raises(ValueError):
        parse_value(KEYS["packing"], raw)


@pytest.mark.parametrize(("raw", "value"), [("5", 5), ("+5", 5), (" 5", 5), ("010", 10), (5, 5)])
def test_whole_numbers(raw, value):
    parsed = parse_value(KEYS["steps"], raw)
    assert parsed == value and type(parsed) is int


@pytest.mark.parametrize("raw", ["5.0", 5.0, "1e3", "0x10", "1_0", "٣", "", True, "0", -1, 2**31, "9" * 5000])
def test_not_a_number_of_steps(raw):
    with pytest.raises(ValueError):
        parse_value(KEYS["steps"], raw)


def test_bounds_are_inclusive_and_seeds_may_use_32_bits():
    assert parse_value(KEYS["init_weights_seed"], str(2**32 - 1)) == 2**32 - 1
    assert parse_value(KEYS["eval_fraction"], "0.9") == 0.9
    for name, raw in [("init_weights_seed", 2**32), ("eval_fraction", "0.91"), ("normalization_layer_epsilon", 0)]:
        with pytest.raises(ValueError, match="out of range"):
            parse_value(KEYS[name], raw)


@pytest.mark.parametrize("raw", [None, "null", "None", "~"])
def test_not_set(raw):
    assert parse_value(KEYS["run_name"], raw) is None
    with pytest.raises(ValueError):
        parse_value(KEYS["steps"], raw)


@pytest.mark.parametrize("name", ["run_name", "dataset_path", "base_output_directory", "load_parameters_path"])
def test_an_empty_value_is_an_unset_variable_and_refused(name):
    with pytest.raises(ValueError, match="empty"):
        parse_value(KEYS[name], "")
    assert parse_value(KEYS["prompt"], "") == ""


def test_text_keeps_its_spelling():
    assert parse_value(KEYS["prompt"], " def\n") == " def\n"
    assert parse_value(KEYS["prompt"], "null") == "null"
    for raw in (7, False, "a\0b"):
        with pytest.raises(ValueError):
            parse_value(KEYS["prompt"], raw)


@pytest.mark.parametrize("raw", ["local,full", "[local, full]", " local , full ", ["local", "full"]])
def test_lists_however_written(raw):
    assert parse_value(KEYS["attention_pattern"], raw) == ("local", "full")


@pytest.mark.parametrize("raw", ["", "[]", "local,,full", "[[local]]", "global", "[local", ["local", None], "[" * 3000])
def test_not_a_list_of_kinds(raw):
    with pytest.raises(ValueError):
        parse_value(KEYS["attention_pattern"], raw)


@pytest.mark.parametrize(
    "raw", ["[[embed, [fsdp]], [mlp, tensor], [norm, null]]", [["embed", ["fsdp"]], ["mlp", "tensor"], ["norm", []]]]
)
def test_axis_rules_however_written(raw):
    expected = (("embed", ("fsdp",)), ("mlp", ("tensor",)), ("norm", ()))
    assert parse_value(KEYS["logical_axis_rules"], raw) == expected


@pytest.mark.parametrize(
    "raw",
    ["", "embed", "[embed]", "[[embed]]", "[[embed, [1]]]", "[[1, [fsdp]]]", 5, None, "[]", "[" * 3000, "[&a [x, *a]]",
     "[[a, !!python/object/apply:os.getcwd []]]"],
)  # fmt: skip
def test_not_axis_rules(raw):
    with pytest.raises(ValueError):
        parse_value(KEYS["logical_axis_rules"], raw)


def test_what_is_allowed_in_words():
    assert describe_allowed(KEYS["steps"]) == "a whole number, at least 1"
    assert describe_allowed(KEYS["init_weights_seed"]) == "a whole number, at least 0, at most 4294967295"
    assert describe_allowed(KEYS["profiler"]) == "one of xplane, or null"
    assert describe_allowed(KEYS["attention_pattern"]) == "a list of full, local, chunked, nope, mla, gated_delta_net"
    assert describe_allowed(KEYS["rope_factor"]) == "a number, above 0"
    assert all(describe_allowed(key) for key in KEYS.values())


MIXTURES = [
    ("[{path: a/b.txt, weight: 2}]", [("a/b.txt", 2.0, None, "b")]),
    ([{"path": "a/*", "weight": 1, "epochs": 3, "name": "x"}], [("a/*", 1.0, 3, "x")]),
    ("[{path: s3://c/web/, weight: .5}, {path: d, weight: 1, epochs: null}]",
     [("s3://c/web/", 0.5, None, "web"), ("d", 1.0, None, "d")]),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "rows"), MIXTURES)
def test_mixtures(raw, rows):
    assert parse_value(KEYS["dataset_mixture"], raw) == tuple(rows)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ("a", "not a list like"),
        ("[]", "empty list"),
        ("[{path: a}]", "path or weight is missing"),
        ("[{path: a, weight: 1, share: 2}]", "unknown share"),
        ("[{path: a, weight: 0}]", "above 0"),
        ("[{path: a, weight: 1, epochs: 0}]", "at least 1"),
        ("[{path: a, weight: x}]", "not a number"),
        ("[{path: a/x, weight: 1}, {path: b/x, weight: 1}]", "two sources have the name x"),
        ("[{path: a, weight: 1}, {path: a, weight: 1, name: b}]", "two sources have the path a"),
        ("[{path: a, weight: 1, name: 'a b'}]", "not of letters"),
    ],
)
def test_not_a_mixture(raw, problem):
    with pytest.raises(ValueError, match=problem):
        parse_value(KEYS["dataset_mixture"], raw)


def test_rules_of_quantization():
    rows = [
        {"module_path": ".*/mlp/.*", "weight_qtype": "int8", "tile_size": 32},
        {"module_path": "a", "act_qtype": None},
    ]
    expected = (QuantRule(".*/mlp/.*", "int8", None, None, 32), QuantRule("a"))
    assert parse_value(KEYS["quant_rules"], rows) == expected
    assert parse_value(KEYS["quant_rules"], str(rows).replace("None", "null")) == expected
    assert parse_value(KEYS["quant_rules"], [plain_value(rule) for rule in expected]) == expected


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ("a", "not a list like"),
        ("[]", "not a list like"),
        ("[{weight_qtype: int8}]", "module_path is missing"),
        ("[{module_path: a, qtype: int8}]", "unknown qtype"),
        ("[{module_path: '(', weight_qtype: int8}]", "no regular expression"),
        ("[{module_path: a, weight_qtype: int3}]", "'int3'.*is none of int8, int4"),
        ("[{module_path: a, weight_qtype: int8, calibration: most}]", "'most'.*is none of absmax"),
        ("[{module_path: a, weight_qtype: int8, tile_size: 1}]", "at least 2"),
    ],
)
def test_not_rules_of_quantization(raw, problem):
    with pytest.raises(ValueError, match=problem):
        parse_value(KEYS["quant_rules"], raw)


@pytest.mark.parametrize("raw", ["64,128", "[64, 128]", [64, 128]])
def test_lists_of_whole_numbers(raw):
    assert parse_value(KEYS["padding_buckets"], raw) == (64, 128)
    assert parse_value(KEYS["padding_buckets"], "64") == parse_value(KEYS["padding_buckets"], 64) == (64,)


@pytest.mark.parametrize("raw", ["64,", "a", "[64, b]", "0", "[]", [1.5]])
def test_not_a_list_of_whole_numbers(raw):
    with pytest.raises(ValueError):
        parse_value(KEYS["padding_buckets"], raw)
