if missing() then
  return reply('MISSING')
end
return record(tonumber(ARGV[5]))
