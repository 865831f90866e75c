"""A store that processes of a job share: documents at one port, for those who know the job's token and for nobody else.

``torch.distributed.TCPStore`` asks nobody who they are, lists its keys for everybody and keeps what anybody sends.  So
whatever decides something is kept here.  Standard library only; nothing is ever unpickled.

Open ``job.py`` first: a process's access; then ``server.py``, who gets in.  ``torch_store.py`` alone needs torch.
"""

from megatron_het.store.job import Address, Store
from megatron_het.store.server import (
    Documents,
    StoreError,
    StoreServer,
    Strangers,
    TokenError,
    client_tls,
    free_port,
    server_tls,
)
