"""The loop's side of an engine: everything between the public door and the device, on one event loop.

A prompt becomes a request::

    Engine.generate ──► Runtime.generate ──► Intake (worker thread: token ids, grammar) ──► Core.submit

and each step brings it tokens, with one ``call_soon_threadsafe`` per step::

    device ──► StepHandle.settle ──► Driver (next turn) ──► Core.resolve ──► Runtime.updated ──► Stream
                                                            scheduler: token ids   wakes the consumer
                                                            text: pieces
"""
