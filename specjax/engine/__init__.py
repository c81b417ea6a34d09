"""The engine: requests that come at any time, through compiled steps of `num_slots` slots.

The states of a request, and the function that begins each:

    queued       it waits, and its prompt is unread         `WaitingQueue.put`
    prefilling   its prompt is read chunk by chunk,         `QueueEntry.read_chunk`,
                 between two steps of the slots             `PrefillBatch.read`
    in a slot    each step gives it tokens                  `Scheduler._admit`
    parked       preempted: it is first in the queue,       `Scheduler.preempt`
                 with its state, and goes to a slot again
    ended        it has a `finish_reason`, from any state   `Request.end`

Words that the files share:

    slot         one of the B requests of the compiled step, or an empty place for one
    entry        what the queue holds: the requests of one prompt, a `PromptGroup`, or one request
                 that was preempted, a `ParkedRequest`
    caches       the models' caches of one prompt while it is read, apart from the slots
    chunk        at most C successive tokens of a prompt, which the models read at once
    batch        the caches of N prompts that one program reads together, each in its place
    piece        up to `piece_size` successive tokens of one prompt of such a batch
    `Piece`      what iterating over a `Request` yields: tokens and text that it gained
    cursor       how much of a request a `RequestStream` has read, in `StreamChunk`s
    matcher      a grammar on the host that gives masks of the next tokens
    row          one of the K + 1 positions of a step, with its logits and masks

Open `engine` first, the public class; then `scheduler`, where a step is a list of named parts.

    async_engine    `AsyncEngine`: an engine that a thread steps, for threads and event loops
    engine          `Engine`, and the choices that it makes when it is made
    scheduler       the host's part: which request is in which slot, and the order of a step
    prefill_batch   prompts that one program reads together
    queue           requests that wait, and how a prompt is read by itself
    submission      checks the arguments of `Engine.submit`
    request_stream  `RequestStream`: the chunks of a request, for a reader in another thread
    request         `Request`: its tokens, its text, its end
    prompt_logprobs  log-probabilities of prompts, listed by the programs that read them
    usage           counts of requests in OpenAI's words
    programs        the compiled programs, bound to an engine's models
    step_sizes      steps over fewer slots, while few of them hold a request
    slots           the device's part: pure functions of a `DecodeState` whose requests are slots
    stop_strings    text of tokens, up to the first stop string

Each file imports only files below it.

Letters: `B` slots, `C` tokens of a chunk, `E` stop ids, `K` drafted tokens, `N` prompts of a batch,
`P` pieces of a chunk, `S` `max_length`, `V` vocabulary.
"""
