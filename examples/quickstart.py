"""Nine posts through a quota of two a second. Run it in two terminals at once: together they still keep to it."""

import time
from threading import Semaphore

from celery import Celery
from celery.contrib.testing.worker import start_worker

from tb_celery import RateLimitedTask

app = Celery("quickstart", broker="memory://")
app.conf.tb_celery = {"buckets": {"demo_api": {"capacity": 3, "refill_rate": 2}}}
started, done = time.monotonic(), Semaphore(0)


@app.task(base=RateLimitedTask, bucket="demo_api")
def post(text: str) -> None:
    print(f"{time.monotonic() - started:4.1f} s  {text}", flush=True)
    done.release()


if __name__ == "__main__":
    for number in range(1, 10):
        post.delay(f"post {number}")
    with start_worker(app, perform_ping_check=False):
        for _ in range(9):
            done.acquire()
        app.control.shutdown()  # without it leaving the block takes some seconds
