"""EAGLE-3 in float64 NumPy, one request at a time and without a cache, from the published tensors.

Tensors have the names of `speculators`. `fields` are those of the head's config.json.
"""

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, positions, theta):
    """[T, heads, D], coordinate i with i + D / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** -(np.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


class Head:
    """A head: fields of its config.json, tensors, and the tables that it shares with the target."""

    def __init__(self, fields, tensors, *, embedding, lm_head):
        self.fields, self.eps = fields, fields["rms_norm_eps"]
        self.w = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
        self.embedding = self.w.get("embed_tokens.weight", np.asarray(embedding, np.float64))
        self.lm_head = self.w.get("lm_head.weight", np.asarray(lm_head, np.float64))

    def norm(self, x, name):
        return rms_norm(x, self.w[f"{name}.weight"], self.eps)

    def project(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def fuse(self, features):
        if self.fields.get("norm_before_fc"):
            features = self.norm(features, "input_norm")
        if self.fields.get("fc_norm"):
            taps = np.split(features, 3, axis=-1)
            taps = [self.norm(tap, f"fc_norm.{n}") for n, tap in enumerate(taps)]
            features = np.concatenate(taps, axis=-1)
        return self.project(features, "fc")

    def layer(self, tokens, states):
        """The layer's output [H] for the last of pairs of tokens i[T] and states [T, H], causal."""
        fields, w = self.fields, "layers.0."
        normed = self.norm(states, f"{w}hidden_norm")
        rows = [self.norm(self.embedding[tokens], f"{w}input_layernorm"), normed]
        rows = np.concatenate(rows, axis=-1)
        size, heads = fields["head_dim"], fields["num_attention_heads"]
        groups, place = fields["num_key_value_heads"], np.arange(len(tokens))
        q, k, v = (
            self.project(rows, f"{w}self_attn.{x}_proj").reshape(len(tokens), -1, size)
            for x in "qkv"
        )
        if fields["model_type"] == "qwen3":
            q = self.norm(q, f"{w}self_attn.q_norm")
            k = self.norm(k, f"{w}self_attn.k_norm")
        q, k = (rotate(x, place, fields["rope_theta"]) for x in (q, k))
        k, v = (np.repeat(x, heads // groups, axis=1) for x in (k, v))
        scores = np.einsum("hd,shd->hs", q[-1], k) / np.sqrt(size)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("hs,shd->hd", weights, v).reshape(-1)
        residual = (normed if fields.get("norm_before_residual") else states)[-1]
        x = residual + self.project(y, f"{w}self_attn.o_proj")
        y = self.norm(x, f"{w}post_attention_layernorm")
        gate, up = (self.project(y, f"{w}mlp.{name}_proj") for name in ("gate", "up"))
        return x + self.project(gate / (1 + np.exp(-gate)) * up, f"{w}mlp.down_proj")

    def draft_logits(self, text, features, drafted):
        """Draft logits [K, V_d] after a text i[n], before each drafted token i[K].

        features: [n - 1, A * E], the taps of all tokens of the text but the last.
        """
        tokens, states, logits = list(text[1:]), self.fuse(features), []
        for token in drafted:
            out = self.layer(np.array(tokens), states)
            normed = self.norm(out, "norm")
            logits.append(self.lm_head @ normed * self.fields.get("logit_scale", 1.0))
            given = normed if self.fields.get("norm_output") else out
            tokens, states = [*tokens, token], np.concatenate([states, given[None]])
        return np.array(logits)
