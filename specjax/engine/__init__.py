"""The engine: requests that come at any time, through one compiled step of `num_slots` slots.

    submit    -> checks a request on the host and queues it
    prefill   -> the first prompts of the queue are read into rows, in chunks between two steps
    admit     -> the row and the request's settings go into an empty slot
    step      -> every slot takes one step of `decode.step`; its output starts for the host
    read      -> while the next step runs, the host gives each request its tokens and empties slots

`engine` is the public class, and the file to open first. `slots` holds the device's part, pure
functions of a `DecodeState` whose requests are slots. `programs` binds them to an engine and
compiles them. `scheduler` is the host's part, and `queue` holds what waits for it. `submission`
checks what a request asks for, and `request` is what it gets. `stop_strings` makes text.

Letters: `B` slots, `C` tokens of a chunk, `E` stop ids, `K` drafted tokens, `S` `max_length`.
"""
