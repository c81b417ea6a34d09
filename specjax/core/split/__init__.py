"""Rows of logits whose vocabulary lies over a mesh axis: what travels between devices.

Device d has tokens `d * width : (d + 1) * width` of each row. Everything that a sampler computes of
a row goes through three functions of `rows`, and is the same number on every device afterwards:

    own_blocks      a device's blocks of 128; of a block over two devices, the rest from the next
    gather_blocks   numbers of all blocks, in the order of the vocabulary
    take            the logits of some tokens, each from the device that has it

So the sums, the order of ties and the noise are those of a whole row. Open `rows` first.
"""
