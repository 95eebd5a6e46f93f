"""state_dict() on rank 0 only: within its deadline a sentence that names the fix. The others sleep, or go on to train ("train")."""

import os
import sys
import time

os.environ["WEFT_TIMEOUT"] = "2s"
os.environ["WEFT_LOG"] = "off"

from two_tables import Model, batch_of, dense  # noqa: E402

import weft  # noqa: E402

weft.init()
model = Model(5)
weft.shard_embeddings(model)
optimizer = weft.optim.hybrid(dense("sgd", model.parameters()))
model.state_dict()  # control: on all ranks it returns
if weft.rank() == 0:
    start = time.monotonic()
    try:
        model.state_dict()
    except weft.Error as error:
        seconds = time.monotonic() - start
        assert "call it on all ranks" in str(error) and "weft.save(model, path)" in str(error), error
        assert isinstance(error, (weft.TimeoutError, weft.TransportError)) and seconds < 8, (error, seconds)
        print("named the fix", flush=True)
    else:
        raise AssertionError("a collective on one rank returned")
elif sys.argv[1] == "sleep":
    time.sleep(5)
else:
    try:
        model(batch_of(0, weft.rank(), weft.size())).backward()
    except weft.Error as error:
        print(f"the others hear of it: {type(error).__name__}", flush=True)
os._exit(0)  # this job is over
