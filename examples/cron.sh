#!/bin/sh
# A cron job that shares its quota with Celery workers of the same user, by the name of the bucket:
#
#     */5 * * * * /srv/examples/cron.sh
#
# It asks before it calls. Exit code 0: go on. 2: over quota. 1: nothing could be decided, and why is on stderr.
cd "$(dirname "$0")" || exit 1

plan=$(tb-celery check --config services.json)
case $? in
    0) echo "calling the API" ;; # curl https://api.example.com/...
    2) echo "over quota, left to the next run: $plan" ;;
    *) exit 1 ;;
esac

# To wait for the turn instead of leaving it to the next run:
#
#     tb-celery run twitter_api --config services.json --timeout 60 -- curl https://api.example.com/...
