#!/usr/bin/env bash
# Brings the miner that runs under pm2 to another version; the old one runs on if anything is wrong.
#
#   scripts/update.sh VERSION      a tag, a branch or a commit
#       --name NAME                of a second miner, as DT_NAME (default: DT_NAME)
#       --no-doctor                leave the doctor out, e.g. while the chain is away
#       --first-step 30m           how long the new version may take to its first inner step
#       --round-wait 2h            how long to wait for the end of a round that is near
#       --pm2 pm2                  the command
#
# Exit status: 0 the new version trains; 1 the old one runs on, or again, and one line says why;
# 2 wrong arguments; 130 Ctrl-C before the switch. --no-tests changes nothing: up to 0.2.0 an update
# ran unit tests.
set -euo pipefail
name=${DT_NAME:-} doctor=yes first_step=30m round_wait=2h pm2=pm2 goes_on=''
say() { echo "$1" 2>/dev/null || true; } # a terminal that was closed must not end a switch
fail() { say "error: $1$goes_on" >&2 && exit "${2:-1}"; }
words=$(getopt -l help,no-doctor,no-tests,name:,first-step:,round-wait:,pm2: -o '' -n error -- "$@") || exit 2
eval "set -- $words"
while [ "$1" != -- ]; do
    case $1 in
    --help) sed -n '2,/^set/s/^# \?//p' "$0" && exit ;;
    --no-*) declare "${1#--no-}=" ;;
    *) key=${1#--} && declare "${key/-/_}=$2" && shift ;;
    esac
    shift
done
{ [ $# = 2 ] && timeout "$first_step" timeout "$round_wait" true; } || fail "give a VERSION, durations such as 30m" 2
target=$2 app=distributed_training_miner${name:+_$name} page=distributed_training_page${name:+_$name}

ask_pm2() { # for program, folder, status, restarts and environment of the app. Fails if there is none
    mapfile -d '' -t found < <("$pm2" jlist 9<&- | grep '^\[[]{]' | node -e '
        for (const { name, pm2_env: app } of JSON.parse(require("fs").readFileSync(0, "utf8")))
            if (name === process.argv[1]) process.stdout.write([app.pm_exec_path, app.pm_cwd,
                // After these pm2 starts nothing again, but still shows "waiting restart".
                (app.stop_exit_codes || []).includes(app.exit_code) ? "ended" : app.status, app.restart_time,
                ...Object.entries(app.env).map((pair) => pair.join("="))].join("\0"))' "$app" 2>/dev/null)
    [ ${#found[@]} -gt 0 ]
}
ask_pm2 || fail "pm2 has no app named $app, so there is nothing to update: pm2 start app.config.js"
[[ ${found[0]} == */neurons/* ]] || fail "$app runs under torchrun: update each machine by hand"
home=$(cd "${found[1]}" && pwd -P) old=$(cd "${found[0]%/neurons/*}" && pwd -P) goes_on="; ${old##*/} runs on"
environment=("${found[@]:4}" "PATH=$PATH" "HOME=$HOME" "DT_HOME=$home" ${PM2_HOME:+"PM2_HOME=$PM2_HOME"})
as_app() (cd "$home" && exec env -i "${environment[@]}" "$@" 9<&-) # 9, the lock, is not for pm2's daemon

{ exec 9<"$home" && flock -n 9; } || fail "another update is under way in $home"
# In the foreground: else Ctrl-C would not reach them. The trap: `timeout` that has not begun its child
# yet ends with a status, not by the signal, and bash would take it for a failure and continue.
trap 'exit 130' INT
timeout --foreground 600 git -C "$old" fetch --tags --force --quiet 9<&- || say "nothing was fetched: only what is here is known"
commit=$(git -C "$old" rev-parse --verify --quiet "origin/$target^{commit}" ||
    git -C "$old" rev-parse --verify --quiet "$target^{commit}") || fail "there is no version $target"
new=$home/versions/${target//[^A-Za-z0-9._-]/-}-${commit:0:12}
[[ ! $new -ef $old ]] || fail "$target runs already"
# Where the environment is not complete the folder is begun again: an update was interrupted.
[ -e "$new/.venv/.installed" ] || git -C "$old" worktree remove --force "$new" 2>/dev/null || rm -rf "$new"
[ -e "$new" ] || git -C "$old" worktree add --quiet --force --detach "$new" "$commit" || fail "$new cannot be made"
[ -e "$new/.venv/.installed" ] || nice "$new/scripts/setup.sh" 9<&- ||
    { rm -rf "$new" && fail "setting up $target failed"; } # the disk may be full: the miner needs it
flags='process.stdout.write(require(process.argv[1]).apps[0].args.join("\0"))'
mapfile -d '' -t flags < <(as_app node -e "$flags" "$new/app.config.js") && wait $! ||
    fail "app.config.js of $target is in error"
run=$(as_app "$new/.venv/bin/python" -m distributed_training run-folder miner "${flags[@]}") ||
    fail "$target refuses its settings"
# Nothing is measured: the GPUs are full of the version that trains.
[ ! "$doctor" ] || as_app "$new/.venv/bin/python" "$new/scripts/diagnose.py" "${flags[@]}" ||
    fail "the doctor of $target failed: correct what it says, or update with --no-doctor"
left=$(awk -v now="$(date +%s)" '$1 == "dt_next_round_timestamp_seconds" { print int($2 - now) }' "$run/metrics.prom" 2>&1 || true)
[[ ! $left =~ ^-?[0-9]+$ || $left -gt 180 || $left -lt -900 ]] ||
    { say "waiting: a round is near" && timeout --foreground "$round_wait" sleep $((left + 900)) 9<&-; } || fail "a round is near"

start() { # from a folder. Returns 0 once it has done an inner step
    "$pm2" delete "$app" >/dev/null 9<&-
    before=$(stat -c %s "$run/events.jsonl" || echo 0)
    timeout "$first_step" grep -qm1 '"kind": "step"' < <(exec tail --pid=$$ -c +$((before + 1)) -F "$run/events.jsonl") &
    waiter=$!
    as_app "$pm2" start "$1/app.config.js" --only "$app" >/dev/null
    # Chain or bucket may be away for a moment: two restarts are no verdict.
    while ask_pm2 && [[ ${found[0]%/neurons/*} -ef $1 && ${found[2]} =~ ^(online|launch|wait) && ${found[3]} -lt 3 ]] &&
        kill -0 $waiter; do sleep 2; done
    ! kill $waiter && wait $waiter
} 2>/dev/null
trap '' INT HUP TERM PIPE # from here on only KILL can leave no version running; pm2 start starts one then
say "switching from $old to $new"
if ! start "$new"; then
    start "$old" && goes_on="; ${old##*/} runs again" || goes_on="; nor did ${old##*/} then: pm2 logs $app"
    fail "$target came to no inner step"
fi
{ "$pm2" delete "$page" 9<&- || true; as_app "$pm2" start "$new/app.config.js" --only "$page" || true; } >/dev/null 2>&1
"$pm2" save >/dev/null 9<&- || say "pm2 save failed: a reboot would not start $new"
say "$app runs $target from $new; the one before is $old"
