"""A mistake in matrix.yaml names its line, what was found, what is accepted and the nearest name."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from toto_compat.contract.request import Device
from toto_compat.errors import ExitCode, MatrixFileError
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_hash
from toto_compat.repro.schema import schema_command

PROJECT = Path(__file__).parents[2]
SHIPPED = PROJECT / "matrix.yaml"

SMALL = """\
schema: 1
environments:
  torch-2.13.0-cpu: &cpu
    torch: "2.13.0"
    build: cpu
    pins: &pins
      numpy: "1.26.4"
  torch-2.9.0-cu128:
    <<: *cpu
    torch: "2.9.0"
    build: cu128
    pins:
      <<: *pins
      numpy: "2.1.3"
caches:
  upstream: {source: builtin}
  fixed_size:
    source: builtin
    settings: [stock, production]
settings:
  stock: {}
  production: {recompile_limit: 256}
modes: [default, reduce-overhead]
profiles:
  quick: {iterations: 3, workloads: [small]}
workloads:
  small: {model: tiny}
gates:
""" + "".join(f"  {gate}: {{max: 1}}\n" for gate in Gate)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "matrix.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def mistakes_in(path: Path) -> list[str]:
    with pytest.raises(MatrixFileError) as caught:
        load_matrix(path)
    assert caught.value.code is ExitCode.MATRIX_FILE
    return [line.strip().removeprefix(f"{path}:") for line in caught.value.message.splitlines()[1:]]


def changed(old: str, new: str) -> str:
    assert SMALL.count(old) == 1, f"{old!r} must stand in the file once"
    return SMALL.replace(old, new)


def line_of(text: str, fragment: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if fragment in line)


def test_the_shipped_file_loads_and_has_the_environments_promised() -> None:
    matrix = load_matrix(SHIPPED)
    assert list(matrix.environments) == [
        "torch-2.13.0-cpu",
        "torch-2.3.1-cu121",
        "torch-2.4.1-cu121",
        "torch-2.5.1-cu124",
        "torch-2.6.0-cu124",
        "torch-2.7.0-cu126",
        "torch-2.8.0-cu128",
        "torch-2.9.0-cu128",
        "torch-2.10.0-cu128",
        "torch-2.11.0-cu130",
        "torch-2.13.0-cu130",
        "torch-2.14.1-cu130",
        "torch-2.15.0-cu132",
    ]
    assert set(matrix.gates) == {gate for gate in Gate if gate.rule.default}
    assert matrix.environments["torch-2.13.0-cpu"].device is Device.CPU
    assert (matrix.gates[Gate.SPEEDUP].min, matrix.gates[Gate.RECOMPILES_TOTAL].max) == (2.0, 9)


def test_the_shipped_profiles_time_enough_forecasts_for_a_percentile() -> None:
    profiles = load_matrix(SHIPPED).profiles
    assert {name: profile.iterations for name, profile in profiles.items()} == {
        "smoke": 3,
        "quick": 3,
        "full": 10,
        "production-check": 3,
        "production-forecast": 3,
    }
    assert all(profile.iterations * profile.forecasts_per_iteration >= 30 for profile in profiles.values())
    assert profiles["production-check"].repeats == 3


def test_production_differs_from_the_other_environments_in_python_numpy_and_einops() -> None:
    matrix = load_matrix(SHIPPED)
    production, other = (matrix.environments[name] for name in ("torch-2.9.0-cu128", "torch-2.8.0-cu128"))
    assert matrix.production == "torch-2.9.0-cu128"
    assert production.python == "3.13"
    assert {package for package in other.pins if production.pins[package] != other.pins[package]} == {"numpy", "einops"}


def test_the_shipped_cu126_wheel_is_not_said_to_run_on_blackwell() -> None:
    environments = load_matrix(SHIPPED).environments.values()
    architectures = {environment.build: environment.gpu_architectures for environment in environments}
    assert "sm_120" not in architectures["cu126"]
    assert all("sm_120" in architectures[build] for build in ("cu128", "cu130", "cu132"))


def test_the_file_carries_the_editor_hint_and_its_schema_is_what_the_command_prints() -> None:
    assert SHIPPED.read_text().splitlines()[0] == "# yaml-language-server: $schema=./matrix.schema.json"
    printed = CliRunner().invoke(schema_command)
    assert printed.exit_code == 0
    assert (PROJECT / "matrix.schema.json").read_text() == printed.output
    assert json.loads(printed.output)["required"][0] == "schema"


def test_merge_keys_and_aliases_give_the_same_data_as_a_plain_yaml_reader(write: Write) -> None:
    matrix = load_matrix(write(SMALL))
    plain = yaml.safe_load(SMALL)
    for name, environment in matrix.environments.items():
        assert environment.model_dump(include=set(plain["environments"][name])) == plain["environments"][name]
    assert matrix.environments["torch-2.9.0-cu128"].pins == {"numpy": "2.1.3"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("model: tiny", "modell: tiny", r"workloads\.small\.modell: found an unknown key; .*did you mean model\?"),
        (
            "model: tiny",
            "model: tinny",
            r"workloads\.small\.model: found 'tinny'; accepted tiny, base; did you mean tiny\?",
        ),
        (
            "workloads: [small]",
            "workloads: [smal]",
            r"profiles\.quick\.workloads\[0\]: found 'smal'; accepted small; did you mean small",
        ),
        (
            "[stock, production]",
            "[stock, prod]",
            r"caches\.fixed_size\.settings\[1\]: found 'prod'; accepted stock, production",
        ),
        ("[stock, production]", "[stock, stock]", r"caches\.fixed_size\.settings\[1\]: found 'stock' a second time"),
        ("[stock, production]", "[]", r"caches\.fixed_size\.settings: found an empty list; accepted stock, production"),
        ("reduce-overhead]", "reduce_overhead]", r"modes\[1\]: .*did you mean reduce-overhead\?"),
        ("reduce-overhead]", "default]", r"modes\[1\]: found 'default' a second time"),
        (
            "  speedup: {max: 1}",
            "  speed_up: {max: 1}",
            r"gates\.speed_up: found the unknown key 'speed_up'; .*mean speedup\?",
        ),
        ("  memory: {max: 1}", "  memory: {}", r"gates\.memory: .*a gate needs min or max"),
        ("  memory: {max: 1}", "  memory: {max: .nan}", r"gates\.memory\.max: found nan .*finite"),
        ("  memory: {max: 1}", "  memory: {min: 2, max: 1}", r"gates\.memory: .*min must not be above max"),
        ("iterations: 3", "iterations: 0", r"profiles\.quick\.iterations: found 0 \(a number\); accepted greater than"),
        ("iterations: 3", "iterations: many", r"profiles\.quick\.iterations: found 'many'; accepted a whole number"),
        ("schema: 1", "schema: 2", r"schema: found 2 \(a number\); accepted 1"),
        ("schema: 1", "schema: 1\nproduction: torch-2.9.0-cu12", r"production: .*did you mean torch-2\.9\.0-cu128\?"),
        ("recompile_limit: 256", "recompile_limit: [256]", r"settings\.production\.recompile_limit: found a list"),
        (
            "  upstream: {",
            "  upstreem: {",
            r"caches\.upstreem\.source: found builtin for 'upstreem'; .*mean upstream\?",
        ),
        ("  upstream: {", "  'up/stream*': {", r"caches\.up/stream\*: found the name"),
        ("  upstream: {", "  sabotaged:slo: {", r"caches\.sabotaged:slo\.source: .*did you mean sabotaged:slow\?"),
        (
            "{source: builtin}",
            "{source: bultin}",
            r"caches\.upstream\.source: found 'bultin'; .*did you mean builtin\?",
        ),
    ],
)
def test_a_mistake_is_told_with_line_key_found_accepted_and_nearest(
    write: Write, old: str, new: str, expected: str
) -> None:
    text = changed(old, new)
    line = line_of(text, new.splitlines()[-1].strip())
    mistakes = mistakes_in(write(text))
    assert any(re.match(rf"{line}: {expected}", mistake) for mistake in mistakes), mistakes


def test_an_unquoted_python_version_is_a_number_to_yaml_and_the_message_says_to_quote_it(write: Write) -> None:
    text = changed("    build: cpu\n", "    build: cpu\n    python: 3.10\n")
    # YAML reads 3.10 as 3.1: silently testing another Python is what the quotes prevent
    assert any(
        'found 3.1 (a number); accepted text in quotes: "3.1"' in mistake for mistake in mistakes_in(write(text))
    )


def test_a_mistake_in_merged_keys_points_at_the_line_where_it_is_written(write: Write) -> None:
    text = changed('      numpy: "1.26.4"', '      numpy: "1.26.4"\n      scipy: ">=1"')
    line = line_of(text, "scipy")
    assert [mistake.split(": ")[1] for mistake in mistakes_in(write(text)) if mistake.startswith(f"{line}: ")] == [
        "environments.torch-2.13.0-cpu.pins.scipy",
        "environments.torch-2.9.0-cu128.pins.scipy",
    ]


def test_a_key_written_twice_is_a_mistake_that_names_both_lines(write: Write) -> None:
    text = changed("  stock: {}\n", "  stock: {}\n  stock: {backend: eager}\n")
    first, second = line_of(text, "stock: {}"), line_of(text, "backend: eager")
    assert mistakes_in(write(text)) == [
        f"{second}: settings.stock: found the key a second time (first in line {first}); accepted each key once"
    ]


def test_a_key_that_overrides_a_merged_one_is_not_written_twice(write: Write) -> None:
    assert load_matrix(write(SMALL)).environments["torch-2.9.0-cu128"].torch == "2.9.0"


def test_every_mistake_is_listed_at_once_in_the_order_of_lines(write: Write) -> None:
    text = SMALL.replace("source: builtin}", "source: bultin}").replace("iterations: 3", "iteration: 3")
    text = text.replace("  memory: {max: 1}\n", "  memroy: {max: 1}\n")
    lines = [int(mistake.split(":")[0]) for mistake in mistakes_in(write(text))]
    assert lines == sorted(lines)
    assert {line_of(text, "bultin"), line_of(text, "iteration:"), line_of(text, "memroy")} <= set(lines)


@pytest.mark.parametrize("name", ["torch-2.13.0-cpu-xformers", "torch-2.13.0-cpu-numpy2"])
def test_an_environment_may_say_what_differs_after_its_identity(write: Write, name: str) -> None:
    assert name in load_matrix(write(changed("  torch-2.13.0-cpu:", f"  {name}:"))).environments


@pytest.mark.parametrize("name", ["torch-2.13-cpu", "newest", "torch-2.13.0-cpux", "torch-2.13.0-cpu-"])
def test_an_environment_name_that_is_not_its_identity_is_a_mistake(write: Write, name: str) -> None:
    [mistake] = mistakes_in(write(changed("  torch-2.13.0-cpu:", f"  {name}:")))
    assert mistake.startswith(f"3: environments.{name}: found the name {name!r}")
    assert mistake.endswith("did you mean torch-2.13.0-cpu?")


def test_torch_among_the_pins_is_a_mistake(write: Write) -> None:
    mistakes = mistakes_in(write(changed('      numpy: "1.26.4"', '      torch: "2.1.0"')))
    assert any("pins.torch: found a pin" in mistake for mistake in mistakes)


def test_a_cache_of_the_users_own_needs_a_file_and_a_class_in_it(write: Write, tmp_path: Path) -> None:
    text = changed("  upstream: {source: builtin}", "  mine: {source: 'caches/mine.py:RollingCach'}")
    assert "found no file" in mistakes_in(write(text))[0]
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches" / "mine.py").write_text("import torch\n\nclass RollingCache:\n    pass\n")
    [mistake] = mistakes_in(write(text))
    assert mistake.endswith("accepted RollingCache; did you mean RollingCache?")
    assert (
        load_matrix(write(text.replace("RollingCach'", "RollingCache'"))).caches["mine"].source.endswith("RollingCache")
    )


def test_a_cache_file_with_a_syntax_error_is_told_and_not_run(write: Write, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine(:\n")
    [mistake] = mistakes_in(write(changed("  upstream: {source: builtin}", "  mine: {source: 'mine.py:Mine'}")))
    assert "not readable Python" in mistake


def test_a_csv_that_is_not_there_is_a_mistake(write: Write) -> None:
    csv = "model: tiny, csv: {path: prices.csv, time_column: time, value_columns: [close]}"
    [mistake] = mistakes_in(write(changed("model: tiny", csv)))
    assert "workloads.small.csv.path: found no file" in mistake


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("schema: 1\nmodes: [default\nx: 1\n", 3),
        ("schema: 1\n\tmodes: 1\n", 2),
        ("schema: 1\nmodes: *nowhere\n", 2),
        ("schema: 1\n---\nschema: 1\n", 2),
        ("schema: !!python/object:os.system x\n", 1),
        ("schema: &a [*a]\n", 1),
        ("a: &a\n  <<: *a\n", 2),
        ("schema: 1\n? [a, b]\n: 1\n", 2),
        ("schema: 1\n2.13: x\n", 2),
        ("just text\n", 1),
        ("schema: \x07\n", 1),
        ("[" * 600, 1),
    ],
)
def test_broken_yaml_is_told_with_its_line(write: Write, text: str, line: int) -> None:
    assert any(mistake.startswith(f"{line}: ") for mistake in mistakes_in(write(text)))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "    <<: *cpu\n",
            "    <<: *cpus\n",
            "found the undefined alias *cpus; accepted the name of an anchor that stands above it: &cpus;"
            " did you mean cpu?",
        ),
        ("  stock: {}\n", "\tstock: {}\n", "found a tab; accepted spaces to indent with"),
        ("    <<: *cpu\n", "    <<: *cpu\n\tpython: '3.12'\n", "found a tab; accepted spaces to indent with"),
        ("model: tiny", "model: 'tiny", "found unexpected end of stream while scanning a quoted scalar; accepted"),
        ("model: tiny}", "model: tiny", "found broken YAML (while parsing a flow mapping expected ',' or '}', but got"),
    ],
)
def test_what_the_yaml_parser_stumbles_over_is_told_in_plain_words(write: Write, old: str, new: str, told: str) -> None:
    [mistake] = mistakes_in(write(changed(old, new)))
    assert mistake.partition(": ")[2].startswith(told)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("schema: 1", "schema: 1\nlimits: {memory: 8 gigs}", "found '8 gigs'; accepted an amount such as 8g or 512m"),
        ("schema: 1", "schema: 1\nlimits: {tmp: 2}", 'found 2 (a number); accepted text in quotes: "2"'),
        ("build: cu128", "build: cuda", "found 'cuda'; accepted cpu, or the CUDA tag of the wheel, such as cu128"),
        ('torch: "2.9.0"', 'torch: "2.9"', "found '2.9'; accepted one exact PyTorch release, such as 2.13.0"),
        ("    build: cpu\n", "    build: cpu\n    python: py3\n", "accepted Python minor version, such as 3.11"),
        ("  production: {recompile_limit: 256}\n", "", "found 'production'; accepted stock"),
        ("reduce-overhead]", "reduce-overhead]\nlimits: {}\nproduction: x", "found 'x'; accepted torch-2.13.0-cpu, "),
        ("modes: [default, reduce-overhead]", "modes: []", "found an empty list; accepted at least 1 of them"),
    ],
)
def test_what_is_accepted_is_said_by_example_and_not_by_pattern(write: Write, old: str, new: str, told: str) -> None:
    mistakes = mistakes_in(write(changed(old, new)))
    assert any(told in mistake for mistake in mistakes), mistakes
    assert not any("^" in mistake for mistake in mistakes)


def test_a_reference_into_a_section_that_is_empty_says_so(write: Write) -> None:
    data = yaml.safe_load(SMALL) | {"production": "torch-2.9.0-cu128", "environments": {}}
    mistakes = mistakes_in(write(yaml.safe_dump(data)))
    told = "production: found 'torch-2.9.0-cu128'; accepted a name under environments, where there is none yet"
    assert any(mistake.endswith(told) for mistake in mistakes), mistakes


@pytest.mark.parametrize("section", [name for name in yaml.safe_load(SMALL) if name != "gates"])
def test_a_section_that_is_missing_is_told_with_what_goes_there(write: Write, section: str) -> None:
    data = {name: value for name, value in yaml.safe_load(SMALL).items() if name != section}
    [mistake] = [one for one in mistakes_in(write(yaml.safe_dump(data))) if f": {section}: found nothing" in one]
    assert not mistake.endswith("accepted a value")


@pytest.mark.parametrize("missing", ["iterations", "workloads"])
def test_a_key_that_a_profile_lacks_is_told_with_what_goes_there(write: Write, missing: str) -> None:
    data = yaml.safe_load(SMALL)
    del data["profiles"]["quick"][missing]
    [mistake] = mistakes_in(write(yaml.safe_dump(data)))
    assert f"profiles.quick.{missing}: found nothing; accepted a " in mistake
    assert not mistake.endswith("accepted a value")


def test_a_file_that_is_not_text_is_told_plainly(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_bytes(b"schema: \xff\xfe1")
    with pytest.raises(MatrixFileError, match="not UTF-8"):
        load_matrix(path)


def test_without_a_matrix_file_the_error_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MatrixFileError, match=re.escape(str(tmp_path))):
        find_matrix_file()
    with pytest.raises(MatrixFileError, match=r"other\.yaml does not exist"):
        find_matrix_file(Path("other.yaml"))
    with pytest.raises(MatrixFileError, match="is a folder"):
        find_matrix_file(tmp_path)
    (tmp_path / "matrix.yaml").write_text(SMALL)
    assert find_matrix_file() == Path("matrix.yaml")


def test_the_hash_ignores_comments_and_order_but_not_limits(write: Write) -> None:
    original = matrix_hash(load_matrix(write(SMALL)))
    assert matrix_hash(load_matrix(write("# a comment\n" + SMALL))) == original
    settings = "  stock: {}\n  production: {recompile_limit: 256}\n"
    swapped = "  production: {recompile_limit: 256}\n  stock: {}\n"
    assert matrix_hash(load_matrix(write(changed(settings, swapped)))) == original
    assert matrix_hash(load_matrix(write(changed("  memory: {max: 1}", "  memory: {max: 2}")))) != original


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ("context: [96, 100]", "100 is none of the model tiny, whose patch has 32 points; the nearest is 96"),
        ("context: [96, 64]", "strictly ascending"),
        ("sampling: [256/100]", "256/100 is none"),
        ("sampling: [256-128]", "samples/batch size"),
        ("timed: [{horizon: 4000}]", "within the longest context and horizon"),
        ("context_patches: [3, 4]", "did you mean context"),
    ],
)
def test_a_length_that_cannot_be_forecast_is_told_with_its_line(write: Write, lengths: str, told: str) -> None:
    [mistake] = mistakes_in(write(changed("model: tiny", f"model: tiny, {lengths}")))
    assert told in mistake
    assert re.match(r"\d+: workloads\.small", mistake)


def test_production_asks_for_forecasts_of_one_patch_and_for_thousands_of_samples() -> None:
    matrix = load_matrix(SHIPPED)
    profile = matrix.profiles[matrix.production_profile]
    assert set(profile.workloads) == set(matrix.production_workloads)
    workload = matrix.workloads["production"]
    assert workload.has_one_patch_forecasts
    assert {384, 128, 64, 32} == {per_batch for _, per_batch in workload.sampled}
    assert {matrix.workloads[name].precision for name in profile.workloads} == {
        "float32",
        "float16 autocast",
        "bfloat16 autocast",
    }


def test_a_name_that_is_too_long_for_a_file_is_a_mistake_with_its_key(write: Write) -> None:
    name = "n" * 300
    text = changed("  upstream: {source: builtin}", f"  mine: {{source: '{name}/{name}.py:Mine'}}")
    assert "found no file" in mistakes_in(write(text))[0]
    csv = f"model: tiny, csv: {{path: {name}, time_column: time, value_columns: [close]}}"
    assert "workloads.small.csv.path: found no file" in mistakes_in(write(changed("model: tiny", csv)))[0]


def test_a_version_with_more_digits_than_python_reads_is_a_mistake(write: Write) -> None:
    mistakes = mistakes_in(write(changed('      numpy: "1.26.4"', f'      numpy: "{"9" * 5000}"')))
    assert any("pins.numpy: found '999" in mistake for mistake in mistakes)
    mistakes = mistakes_in(write(changed('torch: "2.13.0"', f'torch: "2.13.{"9" * 5000}"')))
    assert any(".torch: found '2.13.999" in mistake for mistake in mistakes)


def test_every_shipped_environment_stands_on_a_plain_python_and_a_cuda_build_says_which_gpus_it_has_kernels_for() -> (
    None
):
    """NVIDIA's own images refuse drivers that the wheels run on, and the wheels bring CUDA."""
    for name, environment in load_matrix(SHIPPED).environments.items():
        assert environment.base_image == f"python:{environment.python}-slim", name
        assert bool(environment.gpu_architectures) is (environment.device is Device.CUDA), name
