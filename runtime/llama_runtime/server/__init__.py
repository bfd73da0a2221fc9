"""An HTTP server over a bundle's paged engine, with the API that OpenAI's clients speak.

`app.py` has the routes; a body becomes a request in `schema.py` and work for the engine in
`jobs.py`; `worker.py` is the one thread that runs the engine; `text.py` turns tokens into pieces of
text, `replies.py` and `stream.py` turn pieces into answers; `run.py` starts and ends it all.

Needs the extra `serve`.
"""
