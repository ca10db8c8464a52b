"""Two tasks that do nothing, one of them limited, with tokens in hand: the application of the benchmark's worker."""

from celery import Celery

from benchmarks.contenders import CAPACITY, RATE
from tb_celery import RateLimitedTask

app = Celery("benchmarks")
app.conf.task_ignore_result = True
app.conf.task_acks_late = True  # a message is gone when its task is done
app.conf.tb_celery = {"buckets": {"api": {"capacity": CAPACITY, "refill_rate": RATE}}}


@app.task
def plain() -> None:
    pass


@app.task(base=RateLimitedTask, bucket="api")
def limited() -> None:
    pass
