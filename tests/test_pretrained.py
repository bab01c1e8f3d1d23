"""Real weights from a GGUF file: two minutes and packages of their own, so `make pretrained` runs these tests."""

import importlib.util
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import from_gguf
import heads
from configurator import UserError

needs_packages = pytest.mark.skipif("PRETRAINED" not in os.environ, reason="make pretrained runs this")
TEXT = "The capital of France is Paris. It lies on the Seine, and two million people live there; many more visit it."


@pytest.mark.skipif(importlib.util.find_spec("gguf") is not None, reason="the packages are installed")
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
    x, n_kv_head = heads.measure(model, ids.numpy(), interventions=["own", "zero"])
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    def loss():
        with torch.no_grad():
            return float(eager(ids[:, :-1], labels=ids[:, :-1], shift_labels=ids[:, 1:]).loss)

    untouched = loss()
    assert n_kv_head == 3 and x["loss"][0] == pytest.approx(untouched, abs=1e-4)
    for layer, head in ((0, 0), (14, 4), (29, 8)):
        attention, own, across = eager.model.layers[layer].self_attn, [], []
        for mode, key in (("own", "delta"), ("zero", "delta_zero")):
            kept = {}

            def change(module, inputs, kept=kept, head=head, mode=mode, own=own, across=across):
                y, v = inputs[0].clone().unflatten(-1, (9, 64)), kept["v"].unflatten(-1, (3, 64))
                for i in range(1, y.shape[1]):
                    a, group = y[0, i, head].clone(), head // 3
                    cosines = [float(a @ v[0, i, g] / a.norm() / v[0, i, g].norm()) for g in range(3)]
                    own.append(cosines.pop(group))
                    across.append(np.mean(cosines))
                    d = v[0, i, group]
                    y[0, i, head] = 0 if mode == "zero" else a - (a @ d) / (d @ d) * d
                return (y.flatten(-2),)

            hooks = [attention.v_proj.register_forward_hook(lambda m, i, o, kept=kept: kept.update(v=o))]
            hooks += [attention.o_proj.register_forward_pre_hook(change)]
            removed = loss()
            for hook in hooks:
                hook.remove()
            assert x[key][0, layer, head] == pytest.approx(removed - untouched, abs=2e-5)
        assert x["own"][0, layer, head] == pytest.approx(np.mean(own), abs=1e-5)
        assert x["across"][0, layer, head] == pytest.approx(np.mean(across), abs=1e-5)


@needs_packages
def test_the_weights_are_those_of_the_file(folder):
    """Against the dequantisation of the package gguf; the file interleaves rows of queries, as llama.cpp does."""
    import gguf
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    names = {"token_embd": "embed_tokens", "blk.7.attn_v": "layers.7.self_attn.v_proj"}
    names |= {"blk.7.ffn_down": "layers.7.mlp.down_proj", "blk.7.attn_q": "layers.7.self_attn.q_proj"}
    found = {t.name: t for t in gguf.GGUFReader(from_gguf.packaged()).tensors}
    for name, ours in names.items():
        tensor = found[f"{name}.weight"]
        want = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("attn_q"):  # (9 heads, 32 pairs, 2, C) -> (9 heads, 2 halves, 32, C)
            want = want.reshape(9, 32, 2, -1).swapaxes(1, 2).reshape(want.shape)
        assert np.array_equal(weights[f"model.{ours}.weight"].numpy(), want)


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
