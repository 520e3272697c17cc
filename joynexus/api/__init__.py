"""The in-cluster Python API: a running service, its tenants, and what a tenant can be told to do.

import joynexus

service = joynexus.connect()                     # inside a Ray job; or joynexus.start("service.yaml")
run = service.submit("tenant.yaml")              # high level: the workloads of a spec
run.wait()

tenant = service.open("tenant-without-workloads.yaml")   # low level: calls that return futures
tenant.forward_backward(batch, loss="supervised")
tenant.optim_step(lr=3e-4)
tenant.sync_weights().result()
"""

from joynexus.api.future import Future
from joynexus.api.service import Service, connect, start
from joynexus.api.tenant import Run, Tenant

__all__ = ["Future", "Run", "Service", "Tenant", "connect", "start"]
