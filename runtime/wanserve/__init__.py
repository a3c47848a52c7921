"""A server of videos over artifacts: OpenAI's video routes, a queue that survives, and a page.

``wanrun serve`` starts it (the extra ``serve``). Of the runtime it uses what ``wanrun`` and ``wanrun.errors``
export. One process answers over HTTP and keeps the jobs; each device belongs to another process
(``wanserve.worker``).
"""
