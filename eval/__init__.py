"""What did the cache cost me? Measured on your model and your text, always through the cache.

One forward pass over a text never reads a compressed cache: its keys are the ones just computed. So
everything here feeds tokens in steps, and every step attends to what the cache stored before it.

| module | the question it answers |
|---|---|
| `models.py` | where do the model and the text come from? |
| `contenders.py` | which cache does this name mean, and what does it hold? |
| `scoring.py` | how far from the full cache are its predictions? |
| `proofs.py` | would the harness notice if the cache did nothing, or broke everything? |
| `records.py` | how do results survive a killed run? |
| `memory.py` | how high did memory go? |
| `speed.py` | how fast is a step, and which bytes had to move? |
| `prefill.py` | how long does everything before decode take? |
| `quality.py` | the command `python -m eval quality`: what does a cache cost in predictions, and save in bytes? |
| `retrieval.py` | `python -m eval retrieval`: does it still hold what the question at the end asks for? |
| `streaming.py` | `python -m eval streaming`: how well is a stream predicted that is far longer than the window? |
| `doctor.py` | `python -m eval doctor`: which storage does this model bear, and which of its layers do not? |
| `profile.py` | `python -m eval profile`: what does my workload cost, request by request? |
| `tasks.py` | which questions can be asked here? |
| `run.py` | what does a cache cost in right answers? |
| `ranks.py` | who answers which items, where one run has several processes? |
| `cluster.py` | which machine measures which cell? |
| `paired.py` | is that a difference, or noise? |
| `findings.py` | what do the records say, and how sure is it? |
| `charts.py` | what does that look like? |
| `report.py` | what does all of it look like, on one page? |
"""
