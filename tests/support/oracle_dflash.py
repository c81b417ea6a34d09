"""DFlash in float64 NumPy, one request at a time and without a cache, from the published tensors.

Tensors have the names of `speculators`. `fields` are those of the head's config.json.
"""

import numpy as np
from oracle_eagle3 import rms_norm, rotate


class BlockHead:
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

    def layer(self, n, x, context, first):
        """The stream [block, H] after layer n: rows at positions `first` and after the context."""
        fields, w = self.fields, f"layers.{n}."
        size, theta = fields["head_dim"], fields["rope_theta"]
        normed = self.norm(x, f"{w}input_layernorm")
        place = first + np.arange(len(x))
        # Keys and values of the context are projections of its features, of the block of its rows.
        sources = [(context, np.arange(len(context))), (normed, place)]

        def heads(rows, name):
            return self.project(rows, f"{w}self_attn.{name}_proj").reshape(len(rows), -1, size)

        q = rotate(self.norm(heads(normed, "q"), f"{w}self_attn.q_norm"), place, theta)
        k = [
            rotate(self.norm(heads(rows, "k"), f"{w}self_attn.k_norm"), at, theta)
            for rows, at in sources
        ]
        v = [heads(rows, "v") for rows, _ in sources]
        shared = fields["num_attention_heads"] // fields["num_key_value_heads"]
        k, v = (np.repeat(np.concatenate(parts), shared, axis=1) for parts in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(size)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("hts,shd->thd", weights, v).reshape(len(x), -1)
        x = x + self.project(y, f"{w}self_attn.o_proj")
        y = self.norm(x, f"{w}post_attention_layernorm")
        gate, up = (self.project(y, f"{w}mlp.{name}_proj") for name in ("gate", "up"))
        return x + self.project(gate / (1 + np.exp(-gate)) * up, f"{w}mlp.down_proj")

    def draft_logits(self, text, features, drafted):
        """Draft logits [K, V_d] after a text i[n], of K rows: what is drafted changes nothing.

        features: [n - 1, A * E], the taps of all tokens of the text but the last.
        """
        context = self.norm(self.project(features, "fc"), "hidden_norm")
        ids = np.full(self.fields["block_size"], self.fields["dflash_config"]["mask_token_id"])
        ids[0] = text[-1]
        x = self.embedding[ids]
        for n in range(self.fields["num_hidden_layers"]):
            x = self.layer(n, x, context, len(text) - 1)
        first = 0 if self.fields.get("sample_from_anchor") else 1
        return self.norm(x, "norm")[first : first + len(drafted)] @ self.lm_head.T
