"""A store for the processes of a job: documents at one port, only for clients with the job's token.

``torch.distributed.TCPStore`` has no authentication: any client can list, read and write its keys.  So data on which
decisions depend are kept in this store.  Standard library only; nothing is ever unpickled.

Open ``job.py`` first, the client; then ``server.py`` with the authentication.  Only ``torch_store.py`` needs torch.
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
