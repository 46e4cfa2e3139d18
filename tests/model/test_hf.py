"""The same logits in transformers, both ways, and the same bytes after there and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.helpers import EXPERTS, SMALL, make, some_tokens
from zero2all.base.errors import UsageError, Z2aError
from zero2all.model import HFWeights, Z2all, export_hf, hf_incompatibility, load_hf
from zero2all.model.hf_config import from_hf_config, hf_config
from zero2all.recipe import ModelConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MOE = {"qk_norm": True, "moe": EXPERTS}
GLM_EXPERTS = {**EXPERTS, "scoring_func": "sigmoid", "load_balancing": "bias", "n_shared_experts": 1}
VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "bias": {"qkv_bias": True},
    "bias, window": {"qkv_bias": True, "sliding_window": 7, "full_attention_interval": 2},
    "qk-norm": {"qk_norm": True},
    "qk-norm, bias, tied": {"qk_norm": True, "qkv_bias": True, "tie_word_embeddings": True},
    "qk-norm, window": {"qk_norm": True, "sliding_window": 7},
    "wide heads": {"head_dim": 32},
    "odd vocabulary": {"vocab_size": 301, "tie_word_embeddings": True},
    "other theta": {"rope_theta": 500.0, "rms_norm_eps": 1e-3},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn": {"rope_scaling": YARN},
    "llama3 rope": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}},
    "experts": MOE,
    "experts, one dense layer": {
        "qk_norm": True,
        "moe": {**EXPERTS, "first_k_dense_replace": 1, "norm_topk_prob": False},
    },
    "experts, window, yarn": {**MOE, "sliding_window": 7, "rope_scaling": YARN},
    "sigmoid router": {"moe": GLM_EXPERTS},
    "sigmoid router, tied": {"moe": GLM_EXPERTS, "tie_word_embeddings": True},
    "sigmoid router, biases, dense layer, yarn": {
        "qk_norm": True,
        "qkv_bias": True,
        "rope_scaling": YARN,
        "moe": {**GLM_EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 2, "norm_topk_prob": False},
    },
}


def named(variant: str) -> str:
    config = VARIANTS[variant]
    if "moe" in config:
        return "Glm4MoeForCausalLM" if "scoring_func" in config["moe"] else "Qwen3MoeForCausalLM"
    if "qk_norm" in config:
        return "Qwen3ForCausalLM"
    return "Qwen2ForCausalLM" if "qkv_bias" in config else "LlamaForCausalLM"


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours, tokens = make(**VARIANTS[variant]), some_tokens(below=301)
    export_hf(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(theirs).__name__ == named(variant)
    back = load_hf(tmp_path)
    assert back.config == ours.config
    for name, tensor in ours.state_dict().items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            tensor = tensor.clone()
            tensor[ours.config.vocab_size :] = 0.0  # padding is not stored
        assert torch.equal(tensor, back.state_dict()[name]), name
    with torch.inference_mode():
        logits = ours(tokens)
        assert (logits - theirs(tokens).logits).abs().max() <= 1e-4
        assert torch.equal(logits, back(tokens))


def test_the_tied_head_of_glm_is_written_for_programs_that_do_not_tie_it(tmp_path: Path) -> None:
    export_hf(make(moe=GLM_EXPERTS, tie_word_embeddings=True), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", ["llama", "llama tied", "qwen2", "qwen3", "qwen3_moe", "glm4_moe"])
def test_import_of_what_transformers_wrote(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**SMALL, "vocab_size": 301, "intermediate_size": 96, "tie_word_embeddings": kind == "llama tied"}
    if kind.startswith("qwen3"):
        shape["head_dim"] = 32
    if kind == "qwen3_moe":
        shape |= {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "mlp_only_layers": [0]}
    if kind == "glm4_moe":
        shape |= {
            "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        }  # fmt: skip
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.split()[0], **shape), dtype=torch.float32)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.eval().save_pretrained(tmp_path, max_shard_size="60KB")
    ours, tokens = load_hf(tmp_path), some_tokens(below=301)
    with torch.inference_mode():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() <= 1e-4


def test_in_shards_it_is_the_same_and_bf16_survives(tmp_path: Path) -> None:
    model = make(**MOE).bfloat16().float()
    for name, options in (("one", {}), ("many", {"shard_bytes": 100_000})):
        (tmp_path / name).mkdir()
        export_hf(model, tmp_path / name, dtype=torch.bfloat16, **options)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert all((tmp_path / "many" / name).stat().st_size < 120_000 for name in files)
    for name in ("one", "many"):
        back = load_hf(tmp_path / name)
        assert all(torch.equal(tensor, back.state_dict()[key]) for key, tensor in model.state_dict().items())


def test_what_no_standard_architecture_computes_is_refused_with_what_to_change() -> None:
    for changes, named in [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"sliding_window": 8}, "qk_norm"),
        ({"moe": EXPERTS}, "qk_norm"),
        ({"qk_norm": True, "moe": {**EXPERTS, "scoring_func": "sigmoid"}}, "n_shared_experts"),
        ({"qk_norm": True, "moe": {**EXPERTS, "n_shared_experts": 1}}, "sigmoid"),
        ({"qk_norm": True, "moe": {**EXPERTS, "load_balancing": "bias"}}, "sigmoid"),
        ({"qk_norm": True, "sliding_window": 8, "moe": GLM_EXPERTS}, "sliding_window"),
        ({**MOE, "sliding_window": 8, "full_attention_interval": 2}, "full_attention_interval"),
    ]:
        config = ModelConfig.model_validate({**SMALL, **changes})
        assert named in str(hf_incompatibility(config))
        with pytest.raises(UsageError, match=named):
            hf_config(config)


def test_what_we_do_not_compute_is_refused_by_name() -> None:
    plain = hf_config(ModelConfig.model_validate(SMALL))
    for changes, named in [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial"),
    ]:
        with pytest.raises(UsageError, match=named):
            from_hf_config({**plain, **changes})


def test_a_config_without_a_needed_field_is_refused_with_its_name() -> None:
    plain = hf_config(ModelConfig.model_validate(SMALL))
    del plain["hidden_size"]
    with pytest.raises(Z2aError, match=r"^model/config\.json: hidden_size: "):
        from_hf_config(plain, "model/config.json")


def test_config_of_older_transformers_is_read() -> None:
    old = hf_config(ModelConfig.model_validate({**SMALL, "rope_theta": 5e5, "rope_scaling": YARN}))
    del old["rope_parameters"]
    old["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    config = from_hf_config(old)
    assert config.rope_theta == 5e5
    assert config.rope_scaling is not None
    assert config.rope_scaling.model_dump() == {**config.rope_scaling.model_dump(), **YARN}


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        load_hf(tmp_path)
    export_hf(make(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong, message in [
        ({key: value for key, value in weights.items() if key != name}, "lacks 1 weights, such as " + name),
        ({**weights, name: weights[name][:-1].clone()}, "has shape"),
        ({**weights, "model.extra": torch.zeros(1)}, r"holds model\.extra"),
    ]:
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(Z2aError, match=message):
            load_hf(tmp_path)


def test_a_bias_on_the_output_projection_is_refused_unless_zero(tmp_path: Path) -> None:
    export_hf(make(qk_norm=True, qkv_bias=True), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.bias"
    assert not weights[name].any()
    weights[name][3] = 0.5
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(Z2aError, match="no such bias"):
        load_hf(tmp_path)


def test_the_further_block_stays_at_home(tmp_path: Path) -> None:
    model = make(mtp_weight=0.3)
    export_hf(model, tmp_path)
    back = load_hf(tmp_path)
    assert isinstance(back, Z2all)
    assert back.mtp is None
    assert torch.equal(back(some_tokens()), model(some_tokens()))
    assert "mtp" not in json.dumps(sorted(load_file(tmp_path / "model.safetensors")))


def test_only_safetensors_in_the_directory_are_read(tmp_path: Path) -> None:
    export_hf(make(), tmp_path, shard_bytes=100_000)
    index, shards = tmp_path / "model.safetensors.index.json", sorted(tmp_path.glob("*.safetensors"))
    weight_map = json.loads(index.read_text())
    for name in ("../other.safetensors", "/etc/model.safetensors", "pytorch_model.bin"):
        index.write_text(json.dumps({"weight_map": {**weight_map["weight_map"], "model.norm.weight": name}}))
        with pytest.raises(Z2aError, match=f"names '{name}', which is no safetensors file in"):
            HFWeights(tmp_path)
    index.write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(Z2aError, match=r"index\.json: weight_map: "):
        HFWeights(tmp_path)
    index.unlink()  # all files are read then
    HFWeights(tmp_path)
    shutil.copy(shards[0], tmp_path / "copy.safetensors")
    with pytest.raises(Z2aError, match="which another file holds as well"):
        HFWeights(tmp_path)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pickle file \(pytorch_model\.bin\), which can run code"):
        HFWeights(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UsageError, match=r"model\.safetensors or model\.safetensors\.index\.json is missing"):
        HFWeights(tmp_path)


def test_damaged_quantized_and_missing_files_are_refused(tmp_path: Path) -> None:
    export_hf(make(), tmp_path, shard_bytes=100_000)
    first, *_ = sorted(tmp_path.glob("*.safetensors"))
    content = first.read_bytes()
    for damaged in (content[:-8], content[:100], b"", b"\x80\x04pickle" * 9):
        first.write_bytes(damaged)
        with pytest.raises(Z2aError, match=rf"{first.name} is damaged or not a safetensors file"):
            HFWeights(tmp_path)
    first.unlink()
    with pytest.raises(Z2aError, match=rf"{first.name} is missing"):
        HFWeights(tmp_path)
    first.write_bytes(content)
    weights = load_file(first)
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, first)
    with pytest.raises(Z2aError, match=f"{name} is stored as F8_E4M3; quantized weights cannot be trained"):
        HFWeights(tmp_path)


def test_a_table_of_rotary_frequencies_is_ignored(tmp_path: Path) -> None:
    export_hf(make(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(load_hf(tmp_path)(some_tokens()), make()(some_tokens()))


def test_weights_are_read_in_any_parts(tmp_path: Path) -> None:
    export_hf(make(**MOE), tmp_path, shard_bytes=100_000)
    weights, full = HFWeights(tmp_path), load_hf(tmp_path).state_dict()
    for name, begin, size in [
        ("layers.1.mlp.experts.down_proj", (3, 8, 5), (2, 40, 20)),
        ("layers.0.self_attn.q_proj.weight", (7, 0), (1, 64)),
        ("norm.weight", (60,), (4,)),
    ]:
        part = tuple(slice(first, first + count) for first, count in zip(begin, size, strict=True))
        assert weights.shape(name) == tuple(full[name].shape)
        assert torch.equal(weights.read(name, begin, size), full[name][part])


def test_a_sigmoid_router_without_a_bias_has_a_bias_of_zero(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours, tokens = make(moe={**GLM_EXPERTS, "load_balancing": "aux"}), some_tokens(below=301)
    export_hf(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    back = load_hf(tmp_path)
    assert back.config.moe is not None
    assert back.config.moe.load_balancing == "bias"
    with torch.inference_mode():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() <= 1e-4
        assert torch.equal(ours(tokens), back(tokens))


def test_the_bias_of_experts_keeps_its_precision_in_bf16(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = make(moe=GLM_EXPERTS)
    export_hf(ours, tmp_path, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    bias = ours.state_dict()["layers.0.mlp.bias"]
    assert torch.equal(theirs.model.layers[0].mlp.gate.e_score_correction_bias, bias)


def test_glm_that_rotates_half_of_a_head_is_refused(tmp_path: Path) -> None:
    values = hf_config(ModelConfig.model_validate({**SMALL, "moe": GLM_EXPERTS}))
    del values["rope_parameters"]["partial_rotary_factor"]
    with pytest.raises(UsageError, match=r"partial_rotary_factor is 0\.5"):
        from_hf_config(values)
