from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class PlannedScheduler(Scheduler):
    pass


class PlannedAsyncScheduler(AsyncScheduler):
    pass
