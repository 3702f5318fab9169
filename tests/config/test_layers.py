import pytest

from maxlite.config.layers import LayerSpec, attention_window, layer_groups, layer_places, layer_specs

L, F = LayerSpec("local", "dense"), LayerSpec("full", "dense")


def model_of(tiny_config, layers, pattern):
    window = "null" if "local" not in pattern else "4"
    return tiny_config(
        f"num_decoder_layers={layers}", f"attention_pattern={pattern}", f"sliding_window_size={window}"
    ).model


@pytest.mark.parametrize(
    ("layers", "pattern", "groups"),
    [
        (5, "full", [((F,), 5)]),
        (4, "full,full", [((F,), 4)]),
        (6, "local,full", [((L, F), 3)]),
        (5, "local,full", [((L, F), 2), ((L,), 1)]),
        (8, "local,local,full", [((L, L, F), 2), ((L, L), 1)]),
        (3, "local,local,full", [((L, L, F), 1)]),
        (2, "local,full", [((L, F), 1)]),
    ],
)
def test_layers_fold_into_groups(tiny_config, layers, pattern, groups):
    model = model_of(tiny_config, layers, pattern)
    assert [(group.pattern, group.repeats) for group in layer_groups(model)] == groups


@pytest.mark.parametrize(("layers", "pattern"), [(7, "local,local,full"), (4, "full"), (9, "local,full")])
def test_the_place_of_a_layer_holds_its_spec(tiny_config, layers, pattern):
    model = model_of(tiny_config, layers, pattern)
    kinds = pattern.split(",")
    specs = layer_specs(model)
    assert [spec.attention for spec in specs] == [kinds[n % len(kinds)] for n in range(layers)]
    groups = layer_groups(model)
    places = layer_places(groups)
    assert [groups[place.group].pattern[place.position] for place in places] == list(specs)
    assert len(set(places)) == layers


def test_only_local_layers_have_a_window(tiny_config):
    model = model_of(tiny_config, 2, "local,full")
    assert (attention_window(model, L), attention_window(model, F)) == (4, None)
