"""The application that docker-compose.yml runs as `celery -A twitter worker`; CELERY_BROKER_URL names its broker."""

from celery import Celery
from celery.utils.log import get_task_logger

from tb_celery import RateLimitedTask

app = Celery("twitter")
app.conf.worker_eta_task_limit = 10_000  # waiting tasks, which take 10 kB each
app.conf.tb_celery = {"buckets": {"twitter_api": "300/15m"}}
logger = get_task_logger(__name__)


@app.task(base=RateLimitedTask, bucket="twitter_api")
def post(text: str) -> None:
    logger.info("posted: %s", text)
