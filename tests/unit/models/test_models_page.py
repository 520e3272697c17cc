"""docs/models.md: every family has its place, and the sizes in its tables are those of the specs.

``python tests/unit/models/test_models_page.py`` writes the tables anew.
"""

import re
from pathlib import Path

import pytest

from joynexus.specs.action_module import ActionModuleSpec, GaussianModuleSpec, OftModuleSpec
from joynexus.specs.backbone import BackboneSpec, LiteBackboneSpec
from joynexus.specs.registry import component_types
from joynexus.specs.vlm_backbones import (
    PaliGemmaBackboneSpec,
    Qwen3VlBackboneSpec,
    Qwen25VlBackboneSpec,
    SmolVlmBackboneSpec,
)
from joynexus.training.slot import slot_bytes

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
ANYWHERE = {"path": "anywhere", "dtype": "bfloat16"}
BACKBONES: dict[str, BackboneSpec] = {
    "`smolvlm`, SmolVLM2 500M, 16 layers": SmolVlmBackboneSpec(num_layers=16, **ANYWHERE),
    "`paligemma`, PaliGemma 3B": PaliGemmaBackboneSpec(**ANYWHERE),
    "`qwen3_vl`, Qwen3-VL 4B": Qwen3VlBackboneSpec(**ANYWHERE),
    "`qwen2_5_vl`, Qwen2.5-VL 3B": Qwen25VlBackboneSpec(**ANYWHERE),
    "`lite`": LiteBackboneSpec(dtype="bfloat16"),
}
STATE, ACTION = 8, 7
WIDE = {"reads": "queries", "hidden_dim": 2560}


def modules() -> list[tuple[str, ActionModuleSpec, int, int]]:
    """Name, spec, width of the prefix and horizon."""
    kinds = component_types("action_modules")
    of = {name: kind() for name, kind in kinds.items()}
    heads = [(f"`{name}` beside `lite`", of[name], 192, 8) for name in ("oft", "flow_matching", "diffusion")]
    heads += [(f"`{name}` beside `lite`", of[name], 192, 8) for name in ("gaussian", "discrete_tokens")]
    return [
        ("`smolvla` beside SmolVLM2 500M", of["smolvla"], 960, 50),
        ("`pi0` beside PaliGemma 3B", of["pi0"], 2048, 50),
        ("`pi05` beside PaliGemma 3B", of["pi05"], 2048, 50),
        ("`gr00t` (DiT-B) beside Qwen3-VL 4B", of["gr00t"], 2560, 16),
        ("`oft`, `reads: queries`, as wide as Qwen3-VL 4B", OftModuleSpec(**WIDE), 2560, 16),
        *heads,
    ]


def size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def backbone_rows() -> list[str]:
    rows = []
    for name, spec in BACKBONES.items():
        frames = (2, (224, 224), 48)
        cells = (
            name,
            size(spec.parameter_bytes()),
            f"{spec.prefix_length(*frames)} positions",
            size(spec.prefix_bytes(*frames)),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def module_rows() -> list[str]:
    rows = []
    for name, spec, width, horizon in modules():
        count = spec.num_parameters(prefix_dim=width, state_dim=STATE, action_dim=ACTION, horizon=horizon)
        cells = (name, str(horizon), f"{count / 1e6:.1f} M", size(slot_bytes(count, "float32")))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def with_tables(text: str) -> str:
    """The page with both tables as the specs say."""
    for name, rows in (("backbones", backbone_rows()), ("modules", module_rows())):
        table = re.compile(rf"(<!-- {name}: .*?-->\n\|.*?\n\|.*?\n).*?(<!-- end -->)", re.DOTALL)
        text, found = table.subn(
            lambda match, rows=rows: match[1] + "".join(f"{row}\n" for row in rows) + match[2], text
        )
        assert found == 1, name
    return text


def test_the_sizes_are_those_of_the_specs():
    text = PAGE.read_text()
    assert with_tables(text) == text


@pytest.mark.parametrize("name", sorted(component_types("action_modules")))
def test_every_action_module_has_its_section(name):
    section = PAGE.read_text().partition(f"\n### {name}\n")[2].partition("\n##")[0]
    assert section
    assert "http" in section
    assert re.search(r"`action_modules/\w+\.py`", section)
    assert name == "pi05" or "Loss" in section


@pytest.mark.parametrize("name", sorted(component_types("backbones")))
def test_every_backbone_has_its_row(name):
    assert re.search(rf"^\| `{name}` \|", PAGE.read_text(), re.MULTILINE)


def test_modules_that_give_log_probability_are_named():
    giving = {name for name, kind in component_types("action_modules").items() if kind.gives_log_prob}
    sentence = re.search(r"Modules that give log-probability.*?\.", PAGE.read_text(), re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[0])) == giving == {GaussianModuleSpec().type, "discrete_tokens"}


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
