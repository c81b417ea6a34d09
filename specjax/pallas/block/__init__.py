"""Block verification on the kernels. Open `verify` first, then `judge`.

A prefix is the first j of a request's K drafted tokens x_1, ..., x_K. Its uniform is u_j, and p_j
and q_j are the rows of target and draft after it. The longest accepted prefix is emitted:

    rho_0 = 1        rho_j = min(1, rho_{j-1} p_{j-1}(x_j) / q_{j-1}(x_j))
    Z_j = sum max(rho_j p_j - q_j, 0)        h_j = Z_j / (Z_j + 1 - rho_j) <= rho_j
    accepted:  u_j < h_j, j < K        u_K < rho_K        always, j = 0

The next token is drawn from the residual max(rho_j p_j - q_j, 0), or from p_K. A prefix is open
while bounds of Z_j neither accept nor reject it.

| module | contents |
|---|---|
| `verify` | the launches and their kernels |
| `request_status` | values that a launch stores for the next |
| `judge` | rho of a request's prefixes, and the prefixes that the next drafted token decides |
| `bounds` | bounds of an open prefix, from the heaviest blocks of its row |
| `bonus_row` | the row after a draft that is accepted whole |
"""
