"""The script that Valkey runs: what `policies.limits` does in one process, for the accounts of several gateways.

Rules
1. One call is one step: what ended is settled, then requests are let in or not, in their order; nothing comes in between.
   The time is the server's, so that the clocks of gateways do not matter.
2. It decides, and tells the state behind each decision. Why a request was refused, and what is left, the gateway works out
   of that by `policies.limits`, so that there is one wording of it. A property test holds the two to each other.
3. Places are held by members: one for each gateway that runs, with a lease. What a member without a lease held counts for
   nothing. A member whose lease is over is told so, nothing else is done, and it states anew what it holds.
4. Numbers are whole, and exact up to 2^53. A call says with each account what its limits are; kept is only what was used.

The call, a JSON object; KEYS[1] is what all keys begin with. member: who asks. old: members whose time is over. hello:
begin, with a lease of `lease` microseconds. bye: end, and give everything back. time: [seconds, microseconds], for tests.
accounts: [name, requests, tokens, at once, tokens a day, tokens a month, cost a day, cost a month], 0 without a limit; and,
if the member states what it knows of it, its [running, tokens held, cost held, requests used, tokens used, and of each
budget begin and spent]. Places are as stated; of the rest the larger counts.
process, seq, rows: what ended, as the call of this number; who does not know whether one arrived asks, without rows. A row:
[account, ended, tokens asked, cost asked, tokens beyond what was asked, tokens used, cost used]. asks: [[accounts], tokens,
cost].

The answer: "lapsed"; or the time, the last `seq` before this one or -1, and of each ask whether it was let in and the state
of its accounts (running, tokens held, cost held, requests used, tokens used, and of each budget begin and spent), all as
numbers in one text.
"""

from __future__ import annotations

SCRIPT = r"""
local MINUTE, DAY = 60000000, 86400
local KEEP = 100 * DAY * 1000
local call = cjson.decode(ARGV[1])
local time = call.time or redis.call('TIME')
local wall = tonumber(time[1])
local at = wall * 1000000 + tonumber(time[2])
local prefix, member = KEYS[1], call.member
local gateways = prefix .. ':gateways'
local floor, max = math.floor, math.max

local function text(number) return string.format('%.0f', number) end

-- members: those with a lease, this one among them
for _, old in ipairs(call.old or {}) do redis.call('HDEL', gateways, old) end
local alive = {}
local found = redis.call('HGETALL', gateways)
for i = 1, #found, 2 do
  if tonumber(found[i + 1]) > at then alive[found[i]] = true else redis.call('HDEL', gateways, found[i]) end
end
if call.bye then alive[member] = nil; redis.call('HDEL', gateways, member)
elseif not (call.hello or alive[member]) then return 'lapsed'
else alive[member] = true; redis.call('HSET', gateways, member, text(at + call.lease)) end

-- the day or month of a moment, in UTC; of a month by the civil calendar
local function month_start(months)  -- months since 0000-03
  local year, of = floor(months / 12), months % 12
  local era = floor(year / 400)
  local within = year - era * 400
  local days = within * 365 + floor(within / 4) - floor(within / 100) + floor((153 * of + 2) / 5)
  return (era * 146097 + days - 719468) * DAY
end
local function span(monthly, moment)
  local day = floor(moment / DAY)
  if not monthly then return day * DAY, (day + 1) * DAY end
  local months = floor((day + 719468) * 12 / 365.2425)
  while month_start(months) > moment do months = months - 1 end
  while month_start(months + 1) <= moment do months = months + 1 end
  return month_start(months), month_start(months + 1)
end

-- accounts as of now
local accounts = {}
local function roll(budget)
  while wall >= budget.ends do
    if budget.spent <= budget.limit then
      budget.spent = 0
      budget.begins, budget.ends = span(budget.monthly, wall)
    else
      budget.spent = budget.spent - budget.limit
      budget.begins, budget.ends = span(budget.monthly, budget.ends)
    end
  end
end
local function bucket(limit, used, since)
  if limit > 0 and at > since then used, since = max(0, used - (at - since) * limit), at end
  return {limit = limit, full = limit * MINUTE, used = used, at = since}
end
local function stated(account, said)
  account.mine = {said[1], said[2], said[3]}
  account.requests.used = max(account.requests.used, said[4])
  account.tokens.used = max(account.tokens.used, said[5])
  for i, budget in pairs(account.budgets) do
    local begins, spent = said[4 + 2 * i], said[5 + 2 * i]
    if begins > budget.begins then
      budget.begins, budget.ends = span(budget.monthly, begins)
      budget.spent = spent
      roll(budget)
    elseif begins == budget.begins then budget.spent = max(budget.spent, spent) end
  end
  account.changed = true
end
for place, given in ipairs(call.accounts) do
  local key, fields, gone = prefix .. ':' .. given[1], {}, {}
  local raw = redis.call('HGETALL', key)
  local held, mine = {0, 0, 0}, {0, 0, 0}
  for i = 1, #raw, 2 do
    local name, value = raw[i], tonumber(raw[i + 1])
    local kind, who = string.match(name, '^([nhc]):(.*)$')
    if not kind then fields[name] = value
    else
      local index = kind == 'n' and 1 or kind == 'h' and 2 or 3
      if who == member then mine[index] = value
      elseif alive[who] then held[index] = held[index] + value
      else gone[#gone + 1] = name end
    end
  end
  if #gone > 0 then redis.call('HDEL', key, unpack(gone)) end
  local account = {key = key, others = held, mine = mine, most = given[4], budgets = {}}
  account.requests = bucket(given[2], fields.r or 0, fields.ra or 0)
  account.tokens = bucket(given[3], fields.t or 0, fields.ta or 0)
  for i = 1, 4 do
    if given[4 + i] > 0 then
      local monthly = i % 2 == 0
      local begins, ends = fields['b' .. i] or 0, 0
      if begins > 0 then begins, ends = span(monthly, begins) end
      account.budgets[i] = {limit = given[4 + i], costs = i > 2, monthly = monthly,
        begins = begins, ends = ends, spent = fields['s' .. i] or 0}
      roll(account.budgets[i])
    end
  end
  accounts[place] = account
  if given[9] then stated(account, given[9]) end
end

-- what ended
local last = -1
if call.seq then
  local key = prefix .. ':done:' .. call.process
  last = tonumber(redis.call('GET', key) or -1)
  if call.rows then
    redis.call('SET', key, call.seq, 'PX', KEEP)
    for _, row in ipairs(call.rows) do
      local account = accounts[row[1]]
      for i = 1, 3 do account.mine[i] = max(0, account.mine[i] - row[1 + i]) end
      account.tokens.used = max(0, account.tokens.used + row[5] * MINUTE)
      for _, budget in pairs(account.budgets) do
        budget.spent = budget.spent + (budget.costs and row[7] or row[6])
      end
      account.changed = true
    end
  end
end

-- who comes in
local function fits(account, tokens, cost)
  local held = account.others
  if account.most > 0 and held[1] + account.mine[1] >= account.most then return false end
  if account.requests.limit > 0 and account.requests.used + MINUTE > account.requests.full then return false end
  if account.tokens.limit > 0 and account.tokens.used + tokens * MINUTE > account.tokens.full then return false end
  for _, budget in pairs(account.budgets) do
    local place, amount = 2, tokens
    if budget.costs then place, amount = 3, cost end
    local used = budget.spent + held[place] + account.mine[place]
    if used + amount > budget.limit or used >= budget.limit then return false end
  end
  return true
end
local answer = {time[1], time[2], text(last)}
local function tell(number) answer[#answer + 1] = text(number) end
for _, ask in ipairs(call.asks) do
  local payers, tokens, cost, fit = ask[1], ask[2], ask[3], true
  for _, place in ipairs(payers) do fit = fits(accounts[place], tokens, cost) and fit end
  tell(fit and 1 or 0)
  for _, place in ipairs(payers) do
    local account = accounts[place]
    if fit then
      account.mine = {account.mine[1] + 1, account.mine[2] + tokens, account.mine[3] + cost}
      if account.requests.limit > 0 then account.requests.used = account.requests.used + MINUTE end
      if account.tokens.limit > 0 then account.tokens.used = account.tokens.used + tokens * MINUTE end
      account.changed = true
    end
    for i = 1, 3 do tell(account.others[i] + account.mine[i]) end
    tell(account.requests.used)
    tell(account.tokens.used)
    for i = 1, 4 do
      local budget = account.budgets[i]
      tell(budget and budget.begins or 0)
      tell(budget and budget.spent or 0)
    end
  end
end

-- written back
for _, account in ipairs(accounts) do
  if account.changed then
    local fields = {'r', text(account.requests.used), 'ra', text(account.requests.at),
      't', text(account.tokens.used), 'ta', text(account.tokens.at)}
    for i, budget in pairs(account.budgets) do
      fields[#fields + 1] = 'b' .. i; fields[#fields + 1] = text(budget.begins)
      fields[#fields + 1] = 's' .. i; fields[#fields + 1] = text(budget.spent)
    end
    if account.mine[1] > 0 then
      for i, kind in ipairs({'n:', 'h:', 'c:'}) do
        fields[#fields + 1] = kind .. member; fields[#fields + 1] = text(account.mine[i])
      end
    else redis.call('HDEL', account.key, 'n:' .. member, 'h:' .. member, 'c:' .. member) end
    redis.call('HSET', account.key, unpack(fields))
    redis.call('PEXPIRE', account.key, KEEP)
  end
end
return table.concat(answer, ' ')
"""
